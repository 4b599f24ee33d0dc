"""Launches around attention to latents, and of sparse attention's indexer: see compile_cuda_ops.py.

All tensors are on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from pd_cluster.devices.device import CPU
from pd_cluster.kv.kv_layout import KVLayout, latents, stored_width
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.cuda.attention import latent_heads, listed_keys
from pd_cluster.model.layers.attention.sparse_selection import IndexNorm, IndexRows
from pd_cluster.model.layers.ops import Latents, Norm, Rope

NUM_ROWS, CONTEXT = 8, 20_000


def launch(
    num_heads: int, width: int, rope_width: int, most: int, dtype: torch.dtype = torch.bfloat16, block_size: int = 16
) -> None:
    """Launches everything from an indexer's projections to the lists, for a decode step."""
    with torch.device("meta"):
        queries, keys = torch.empty(NUM_ROWS, num_heads, width, dtype=dtype), torch.empty(NUM_ROWS, width, dtype=dtype)
        norm = IndexNorm(torch.empty(width), torch.empty(width), 1e-6)
        rope = Rope(*(torch.empty(NUM_ROWS, rope_width, dtype=dtype) for _ in range(2)))
        plane = torch.empty(4000, 61, block_size, 1, width, dtype=dtype)[:, 3]
        starts = torch.empty(NUM_ROWS + 1, dtype=torch.int32)
        batch = SimpleNamespace(
            slot_mapping=torch.empty(NUM_ROWS, dtype=torch.int64),
            query_starts=starts,
            context_lens=starts[1:],
            block_table=torch.empty(9999, dtype=torch.int32),
            table_starts=starts,
            host_context_lens=np.full(NUM_ROWS, CONTEXT),
            pool=SimpleNamespace(device=CPU, planes=lambda layer_idx: [plane] * 3),
            num_tokens=NUM_ROWS,
            num_seqs=NUM_ROWS,
            key_limits=None,
            kernel_state=None,
        )
        prepared = listed_keys.prepare_index(queries, keys, norm, rope)
        rows = IndexRows(0, prepared[0], torch.empty(NUM_ROWS, num_heads), prepared[1], most)
        listed_keys.choose_keys(rows, cast(ForwardBatch, batch), lists_all=False)


def launch_latents(num_heads: int, num_rows: int, dtype: torch.dtype = torch.bfloat16, codes: str = "") -> None:
    """Launches what surrounds attention to latents of 512 numbers, for heads of 128 + 64."""
    layout = KVLayout(1, 1, latents(512, 64), 16, codes or "bfloat16")
    with torch.device("meta"):
        layer = Latents(
            layer_idx=0,
            norm=Norm(torch.empty(512, dtype=dtype), 1e-6),
            keys=torch.empty(num_heads, 128, 512, dtype=dtype),
            values=torch.empty(num_heads, 512, 128, dtype=dtype),
            rope_width=64,
            scaling=0.1,
        )
        widths = [stored_width(layout.dtype, plane.width) for plane in layout.planes]
        pools = [torch.empty(4000, 61, 16, 1, width, dtype=TORCH_DTYPES[layout.dtype])[:, 3] for width in widths]
        batch = SimpleNamespace(
            pool=SimpleNamespace(layer=lambda layer_idx: pools, layout=layout),
            slot_mapping=torch.empty(num_rows, dtype=torch.int64),
            layer_written=lambda layer_idx, window: None,
        )
        rows = latent_heads.LatentRows(
            torch.empty(num_rows, num_heads * 192, dtype=dtype),
            torch.empty(num_rows, 576, dtype=dtype),
            Rope(*(torch.empty(num_rows, 64, dtype=dtype) for _ in range(2))),
        )
        by = latent_heads.LatentKernels(lambda query, *_: query[..., :512])
        latent_heads.attend_latents(by, layer, rows, cast(ForwardBatch, batch))


FEW: dict[str, Callable[[], None]] = {
    "latents of DeepSeek": lambda: launch_latents(128, 8),
    "indexer of V3.2": lambda: launch(64, 128, 64, 2048),
}
OTHERS: dict[str, Callable[[], None]] = {
    "latents, many rows": lambda: launch_latents(16, 100),
    "latents, float32": lambda: launch_latents(20, 100, torch.float32),
    "latents into int8": lambda: launch_latents(20, 8, codes="int8"),
    "latents into fp8": lambda: launch_latents(20, 8, codes="fp8_e4m3"),
    "indexer of GLM-5": lambda: launch(32, 128, 64, 2048, torch.float16, 64),
    "indexer, float32": lambda: launch(64, 128, 64, 2048, torch.float32),
    "indexer of odd widths": lambda: launch(40, 72, 24, 100),
    "indexer, the largest": lambda: launch(128, 256, 128, 4096),
}
