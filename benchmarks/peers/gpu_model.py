"""Writes a Llama of random weights, made on the device, as sharded safetensors; with a tokenizer.

Weights keep activations near one: inputs of matrices are normalised. The output is meaningless; token ids go in and
come out.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import transformers

from benchmarks.gpu.spec import GpuShape, GpuSpec, Writer, child_main
from benchmarks.peers.make_model import make_tokenizer
from benchmarks.tiny_model import EOS_ID
from pd_cluster.devices.device import Device, resolve, use

SEED = 0
SHARD_NBYTES = 1 << 30


def measure(spec: GpuSpec, results: Writer) -> None:
    device, folder, start_s = resolve(spec.device), Path(spec.model), time.perf_counter()
    use(device)
    with results.section("model"):
        write_model(spec.shape, folder, device)
        results.figure("model written in", time.perf_counter() - start_s, "s")
        results.figure("model on disk", sum(file.stat().st_size for file in folder.iterdir()) / 1e9, "GB")


def write_model(shape: GpuShape, folder: Path, device: Device) -> None:
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.hidden_size**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=EOS_ID - 1,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID - 2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    with torch.device(device.torch_name):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    nbytes = 2 * shape.num_parameters
    model.save_pretrained(folder, max_shard_size=min(SHARD_NBYTES, nbytes // 2))  # several, and so an index
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(shape.vocab_size), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    child_main(measure)
