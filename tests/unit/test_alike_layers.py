"""With identical layers, pools send, store and hash the same bytes as before layers could differ."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec
import pytest
import torch

from pd_cluster.kv.kv_layout import KVLayout, keys_and_values, latents
from pd_cluster.kv.kv_pool import KVPool, probe_content
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.kv.open_stores import seal_of
from pd_cluster.kv.pack import pack
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.wire import KVPiece

HEADS = KVLayout(3, 4, keys_and_values(16), 4, "bfloat16", tp_size=2, tp_rank=1)
LAYOUTS = {
    "heads": HEADS,
    "codes": replace(HEADS, dtype="int8"),
    "latents": KVLayout(3, 1, latents(48, 16), 4, "float32"),
}
PIECES = KVPiece(0, 8, 0, 3, [5, 2]), KVPiece(4, 5, 1, 2, [3, 0])
RECORDED = {
    "heads": {
        "pool": "ddb35bfaca51deeb",
        "planes": "eaaa20076841176e",
        "layer by layer": "eaaa20076841176e",
        "payloads of blocks": "37e2724b87fd58da",
        "payloads of layers": "37e2724b87fd58da",
        "info": "20ba6bc5a333558e",
        "seal": "faef0c84d69b24b9",
        "sizes": "fe3f8871686a3b9a",
    },
    "codes": {
        "pool": "93040ad8e72cdd71",
        "planes": "f921ed161d0dcb21",
        "layer by layer": "f921ed161d0dcb21",
        "payloads of blocks": "52669ae2f3f9d294",
        "payloads of layers": "52669ae2f3f9d294",
        "info": "e031f0737ad1cd5d",
        "seal": "bd3b89e8c4f1f25f",
        "sizes": "0b97b864377d53d9",
    },
    "latents": {
        "pool": "c9e23a66345914bf",
        "planes": "3dbc5d7e6a5594f5",
        "layer by layer": "3dbc5d7e6a5594f5",
        "payloads of blocks": "a5030c917d90a2e9",
        "payloads of layers": "a5030c917d90a2e9",
        "info": "bdf82e1a179c5d57",
        "seal": "d461ab327e2e0d9e",
        "sizes": "4e64894ebf59c429",
    },
}


def filled(layout: KVLayout) -> KVPool:
    """Returns a pool whose blocks hold different numbers, written like received blocks."""
    pool = KVPool(layout, 6)
    for block in range(6):
        pool.put_block(block, probe_content(layout, block))
    return pool


def digests(layout: KVLayout) -> dict[str, str]:
    pool = filled(layout)
    dtype = TORCH_DTYPES[layout.dtype]
    layers = LayerMajor(layout, [torch.zeros(shape, dtype=dtype) for shape in LayerMajor.shapes(layout, 6)])
    whole = KVPiece(0, 6 * layout.block_size, 0, layout.num_layers, list(range(6)))
    layers.scatter(pool.memory.gather(whole), whole, whole.block_ids)
    routes = (
        PoolRoute(layout, layout),
        PoolRoute(layout, replace(layout, block_size=8)),
        PoolRoute(layout, layout, wants_int8=True),
    )
    found = {
        "pool": [pool.flat()[:6]],
        "planes": [plane[:6].contiguous() for layer in range(3) for plane in pool.memory.planes(layer)],
        "layer by layer": layers.parts,
        **{
            f"payloads of {name}": [pack(memory, piece, route) for piece in PIECES for route in routes]
            for name, memory in (("blocks", pool.memory), ("layers", layers))
        },
    }
    parts = {name: b"".join(each.view(torch.uint8).numpy().tobytes() for each in of) for name, of in found.items()}
    parts["info"] = msgspec.msgpack.encode(layout.to_info()) + msgspec.json.encode(layout.to_info())
    parts["seal"] = seal_of([b"k" * 32], layout, ["origin"]).names(b"x" * 32)[0].encode()
    parts["sizes"] = repr((layout.block_nbytes, layout.token_nbytes, layout.block_numel)).encode()
    pool.close()
    return {name: hashlib.sha256(of).hexdigest()[:16] for name, of in parts.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_as_recorded(name: str) -> None:
    assert digests(LAYOUTS[name]) == RECORDED[name]
