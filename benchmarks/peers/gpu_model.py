"""Writes a model of random weights as sharded safetensors, quickly: made on the device, written by several threads.

Standard deviations keep every activation near one: inputs of matrices are normalised, and a layer's addition to the
residual stream shrinks with the number of layers. The output is meaningless; token ids go in and come out.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.spec import BF16_NBYTES, INDEX_FILE, GpuShape, GpuSpec, Writer, child_main
from benchmarks.peers.make_model import make_tokenizer
from benchmarks.tiny_model import EOS_ID
from pd_cluster.devices.device import Device, resolve, use

SEED = 0
NUM_WRITERS = 4
LAYERS_A_SHARD = 2

Tensors = dict[str, tuple[tuple[int, ...], float | None]]  # name -> shape, standard deviation; None: all ones


def measure(spec: GpuSpec, results: Writer) -> None:
    with results.section("model"):
        device, folder = resolve(spec.device), Path(spec.model)
        use(device)
        folder.mkdir(parents=True, exist_ok=True)
        start_s = time.perf_counter()
        write_config(spec.shape, folder)
        write_weights(spec.shape, folder, device)
        took_s = time.perf_counter() - start_s
        nbytes = sum(file.stat().st_size for file in folder.iterdir())
        results.figure("model written in", took_s, "s")
        results.figure("model on disk", nbytes / 1e9, "GB")


def write_config(shape: GpuShape, folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=EOS_ID - 1,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID - 2,
        tie_word_embeddings=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(shape.vocab_size), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def shards(shape: GpuShape) -> Iterator[Tensors]:
    """Yields the weights of the whole model, a file at a time."""
    hidden = shape.hidden_size
    yield {"model.embed_tokens.weight": ((shape.vocab_size, hidden), 1.0)}
    for first in range(0, shape.num_layers, LAYERS_A_SHARD):
        tensors: Tensors = {}
        for layer in range(first, min(first + LAYERS_A_SHARD, shape.num_layers)):
            tensors |= layer_tensors(shape, f"model.layers.{layer}.")
        yield tensors
    head = ((shape.vocab_size, hidden), 1 / math.sqrt(hidden))
    yield {"model.norm.weight": ((hidden,), None), "lm_head.weight": head}


def layer_tensors(shape: GpuShape, prefix: str) -> Tensors:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    attention, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    into, shrink = 1 / math.sqrt(hidden), 1 / math.sqrt(2 * shape.num_layers)
    tensors: Tensors = {
        "self_attn.q_proj.weight": ((attention, hidden), into),
        "self_attn.k_proj.weight": ((kv, hidden), into),
        "self_attn.v_proj.weight": ((kv, hidden), into),
        "self_attn.o_proj.weight": ((hidden, attention), shrink / math.sqrt(attention)),
        "mlp.gate_proj.weight": ((wide, hidden), into),
        "mlp.up_proj.weight": ((wide, hidden), into),
        "mlp.down_proj.weight": ((hidden, wide), shrink / math.sqrt(wide)),
        "input_layernorm.weight": ((hidden,), None),
        "post_attention_layernorm.weight": ((hidden,), None),
    }
    return {prefix + name: each for name, each in tensors.items()}


def write_weights(shape: GpuShape, folder: Path, device: Device) -> None:
    """Writes the weights. Each writer holds one shard in host memory; the next is made on the device meanwhile."""
    every = list(shards(shape))
    generator = torch.Generator(device.torch_name).manual_seed(SEED)
    files: dict[str, str] = {}
    under_way: list[Future[None]] = []
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        for number, tensors in enumerate(every, 1):
            name = f"model-{number:05}-of-{len(every):05}.safetensors"
            files |= dict.fromkeys(tensors, name)
            made = {tensor: make(*each, device, generator) for tensor, each in tensors.items()}
            if len(under_way) >= NUM_WRITERS:
                under_way.pop(0).result()
            under_way.append(writers.submit(write_shard, folder / name, made))
        for each in under_way:
            each.result()
    total = BF16_NBYTES * sum(math.prod(size) for tensors in every for size, _ in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / INDEX_FILE).write_text(json.dumps(index))  # the last file: the model is whole


def make(size: tuple[int, ...], std: float | None, device: Device, generator: torch.Generator) -> torch.Tensor:
    """Makes a bfloat16 tensor on the device."""
    tensor = torch.ones(size, dtype=torch.bfloat16, device=device.torch_name)
    return tensor if std is None else tensor.normal_(0.0, std, generator=generator)


def write_shard(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the format: 8 bytes of the header's length, the header in JSON, then all numbers in the header's order.

    The library would copy each tensor once more before it writes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            numbers: Any = tensor.flatten().cpu().view(torch.uint8).numpy()
            left = memoryview(numbers)
            while left:  # a write of more than 2 GiB is cut short
                left = left[out.write(left) :]


if __name__ == "__main__":
    child_main(measure)
