"""llama.cpp through llama-cpp-python's low-level API: one batch per step, decodes first, then chunks of prompts.

Runs in an environment of its own (scripts/setup_bench_peers.sh), so it imports nothing of pd_cluster. Unified KV cache
of fp32, or of fp16 beside weights of fewer bits; greedy by numpy's argmax over the requested logits.

It is measured with flash attention, which llama.cpp selects itself and which is nearly twice as fast here. That
computes in half precision, so close calls may lead to other tokens; the warm-up runs without it, for exact tokens.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

NUM_BATCH_TOKENS = 2048
NUM_UBATCH_TOKENS = 512
GGML_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30}
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
FLASH_OFF, FLASH_ON = 0, 1
LOG_LEVEL_ERROR = 4


class Engine:
    """A context and one reusable batch."""

    def __init__(
        self, model: Any, num_threads: int, num_seqs: int, num_kv_tokens: int, flash: int, kv_type: str
    ) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = num_kv_tokens
        settings.n_batch, settings.n_ubatch = NUM_BATCH_TOKENS, NUM_UBATCH_TOKENS
        settings.n_seq_max = num_seqs
        settings.n_threads = settings.n_threads_batch = num_threads
        settings.type_k = settings.type_v = GGML_TYPES[kv_type]
        settings.kv_unified = True
        settings.flash_attn_type = flash
        settings.no_perf = True
        self.context = llama_cpp.llama_init_from_model(model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context of {num_seqs} sequences and {num_kv_tokens} tokens")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(NUM_BATCH_TOKENS, 0, 1)
        self.memory = llama_cpp.llama_get_memory(self.context)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> Any:
        """Computes (token_id, position, sequence, wanted) rows; returns the wanted ones' argmax, in their order."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token_id, position, seq, wanted) in enumerate(rows):
            batch.token[i] = token_id
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = wanted
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status} for {len(rows)} tokens")
        num_wanted = sum(wanted for *_, wanted in rows)
        if not num_wanted:
            return []
        pointer = ctypes.cast(llama_cpp.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(pointer, (num_wanted, self.vocab_size))
        return logits.argmax(-1).tolist()

    def forget(self, seq: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, seq, -1, -1)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def log_errors(level: int, text: bytes, _: Any) -> None:
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def load(gguf: str) -> Any:
    llama_cpp.llama_log_set(log_errors, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(gguf.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp did not load {gguf}")
    return model


def with_fewer_bits(gguf: Path, kind: str, head_kind: str) -> Path:
    """Writes a form of the file, float32, with these types of weights, unless it is there. Its inputs stay float32."""
    file = gguf.with_name(f"{gguf.stem}-{kind}-{head_kind}.gguf")
    if not file.exists():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = FILE_TYPES[kind]
        settings.output_tensor_type = GGML_TYPES[head_kind]
        settings.token_embedding_type = GGML_TYPES["F32"]
        settings.pure = False
        if llama_cpp.llama_model_quantize(str(gguf).encode(), str(file).encode(), settings):
            raise RuntimeError(f"llama.cpp did not write {kind}")
    return file


def run(engine: Engine, workload: dict[str, Any], num_seqs: int) -> dict[str, Any]:
    """Batches continuously: as many requests as there are sequences, the next one when one ends."""
    prompts, lens = workload["prompts"], workload["output_lens"]
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)  # tokens in the cache
    waiting = list(range(len(prompts)))
    free = list(range(num_seqs))
    seqs: dict[int, int] = {}  # request -> sequence
    start_s = time.perf_counter()
    while waiting or seqs:
        while waiting and free:
            seqs[waiting.pop(0)] = free.pop()
        rows: list[tuple[int, int, int, bool]] = []
        sampled: list[int] = []
        for request in sorted(seqs, key=lambda each: not outputs[each]):
            tokens = outputs[request][-1:] or prompts[request][done[request] :]
            tokens = tokens[: NUM_BATCH_TOKENS - len(rows)]
            first = done[request]
            done[request] += len(tokens)
            last = done[request] - 1 if done[request] >= len(prompts[request]) else -1
            rows += [(token, at, seqs[request], at == last) for at, token in enumerate(tokens, first)]
            if last >= 0 and tokens:
                sampled.append(request)
        for request, token_id in zip(sampled, engine.decode(rows), strict=True):
            outputs[request].append(token_id)
            if len(outputs[request]) == lens[request]:
                seq = seqs.pop(request)
                engine.forget(seq)
                free.append(seq)
    return {"took_s": time.perf_counter() - start_s, "outputs": outputs}


def main() -> None:
    spec_file, result_file = map(Path, sys.argv[1:])
    spec = json.loads(spec_file.read_text())
    workloads = spec["workloads"]
    num_seqs = min(64, max([spec["batch_size"], *(len(each["prompts"]) for each in workloads)]))
    num_kv_tokens = 256 + max(
        sum(len(p) + n for p, n in zip(each["prompts"], each["output_lens"], strict=True))
        for each in [spec["warmup"], *workloads]
    )
    gguf, kv_type = spec["gguf"], "F32"
    if spec["gguf_type"]:
        gguf, kv_type = str(with_fewer_bits(Path(gguf), spec["gguf_type"], spec["gguf_head_type"])), "F16"
    model = load(gguf)
    exact = Engine(model, spec["num_threads"], num_seqs, num_kv_tokens, FLASH_OFF, kv_type)
    runs = {spec["warmup"]["name"]: run(exact, spec["warmup"], num_seqs)}
    engine = Engine(model, spec["num_threads"], num_seqs, num_kv_tokens, FLASH_ON, kv_type)
    run(engine, spec["warmup"], num_seqs)
    runs.update({each["name"]: run(engine, each, num_seqs) for each in workloads})
    result = {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "settings": f"unified {kv_type} KV cache of {num_kv_tokens} tokens, {num_seqs} sequences, "
        f"batches of {NUM_BATCH_TOKENS}, ubatches of {NUM_UBATCH_TOKENS}, flash attention; "
        + llama_cpp.llama_print_system_info().decode().strip(),
        "runs": runs,
    }
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
