"""`python -m benchmarks engine --shape hybrid-1B`: a hybrid with random weights, in which three of four layers keep
states.

Compares decode to reading weights and states, and a prompt to generate(). Measures a conversation's second turn and a
fork. With one thread, all times are the process's CPU times, which a busy machine affects less.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.floors import read_bandwidth
from benchmarks.peers.make_model import write
from benchmarks.peers.ours import Driver, greedy
from benchmarks.random_models import Goal, model_of, results
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.model.inputs.state_rows import Segment, StateRows
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.states.recurrent_layers import GatedState
from pd_cluster.native.recurrence_values import StateInputs
from pd_cluster.native.streaming_copy import streaming_copy
from pd_cluster.result_tables import Result
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling

NAME = "hybrid-1B"
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "intermediate_size": 6144,
    "vocab_size": 32000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SMALL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 320, "intermediate_size": 256}
NUM_SEQS, NUM_TRIES, ANSWER, QUESTION = 8, 10, 16, 64
GOALS: tuple[Goal, ...] = (
    ("decode at 16,384 tokens ÷ at 1,024", "lower", 1.25, "decode_16384_ms", "decode_1024_ms"),
    ("decode of 8 ÷ reading weights and passing over states", "lower", 1.4, "decode_of_8_ms", "floor_of_8_ms"),
    ("generate()'s prefill of 1,024 tokens ÷ ours", "higher", 1.25, "generate_1024_ms", "prefill_1024_ms"),
    ("recurrence and convolution, share of the prefill", "lower", 0.15, "states_1024_ms", "prefill_1024_ms"),
    ("second turn ÷ the cold first token", "lower", 0.3, "second_turn_ms", "cold_2048_ms"),
    ("fork of 4 ÷ copying its bytes", "lower", 1.5, "fork_ms", "copies_ms"),
)


def measure(rounds: int, quick: bool) -> Iterator[Result]:
    of = 16 if quick else 1  # divisor of the numbers of tokens
    model = model_of("qwen3_5_text", {**SHAPE, **(SMALL if quick else {})})
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        write(model, Path(folder))
        length = 16384 // of
        sizes: dict[str, Any] = {"max_model_len": length, "num_blocks": length // 16, "max_num_batched_tokens": 2048}
        config = EngineConfig(model=folder, dtype="float32", device="cpu", max_num_seqs=NUM_SEQS, **sizes)
        bench = Bench(*build_core(config), seed=0)
    for part in (part for pool in bench.runner.pools for part in pool.memory.parts):
        part.normal_(std=0.1)
    return results([bench.figures(model, of) for _ in range(rounds)], GOALS)


class Bench(Driver):
    def figures(self, model: Any, of: int) -> dict[str, float]:
        prompt, embedding = self.prompt(1024 // of), model.get_input_embeddings().weight
        read_nbytes = 4 * (sum(each.numel() for each in model.parameters()) - embedding.numel())
        found = {
            "decode_1024_ms": self._decode_ms(1, 1024 // of),
            "decode_16384_ms": self._decode_ms(1, 16384 // of),
            "decode_of_8_ms": self._decode_ms(NUM_SEQS, 128),
            "floor_of_8_ms": 1e3 * read_nbytes / read_bandwidth(1 << (30 if of == 1 else 24), clock=clock)
            + self._copies_ms(NUM_SEQS, NUM_SEQS),
            "prefill_1024_ms": self._first_token_ms(prompt)[0],
            "states_1024_ms": self._states_ms(len(prompt)),
        }
        ids = torch.tensor([prompt])
        found["generate_1024_ms"] = took_ms(lambda: model.generate(ids, max_new_tokens=1, do_sample=False))
        turn = self.prompt(2048 // of)
        found["cold_2048_ms"], answer = self._first_token_ms(turn, ANSWER)
        found["second_turn_ms"], _ = self._first_token_ms([*turn, *answer, *self.prompt(QUESTION)])
        return {**found, "fork_ms": self._fork_ms(), "copies_ms": self._copies_ms(3, 1)}

    def _decode_ms(self, num_seqs: int, length: int) -> float:
        """Returns the shortest time of a step of `num_seqs` sequences with `length` tokens each, and their own states.

        All sequences attend to the same tokens.
        """
        order, blocks, known = RequestSpec([5] * length, Sampling()), [*range(length // 16)], length - 1
        requests = [Request("r", order, num_computed_tokens=known, tables=[blocks, [at]]) for at in range(num_seqs)]
        chunks = [(request, 1) for request in requests]
        return min(took_ms(lambda: self.runner.forward(chunks).logits.argmax(-1)) for _ in range(NUM_TRIES))

    def _first_token_ms(self, prompt: list[int], num_tokens: int = 1) -> tuple[float, list[int]]:
        request = self.add(prompt, greedy(num_tokens))
        found_ms = took_ms(lambda: self.until(lambda: bool(request.output_token_ids)))
        self.drain()
        return found_ms, request.output_token_ids

    def _states_ms(self, num_rows: int) -> float:
        """Returns the time that all layers take between their projections."""
        model, pool, found_ms = self.runner.model, self.runner.pools[1], 0.0
        assert isinstance(model, FusedCausalLM)
        rows_of = StateRows.of(pool, [Segment(0, num_rows, 0)])
        for layer in (each.attention for each in model.layers if isinstance(each.attention, GatedState)):
            rows = torch.randn(num_rows, sum(layer.widths))
            convolved, gate, decays, betas = torch.split(rows, list(layer.widths), dim=1)
            inputs, planes = StateInputs(convolved, decays, betas, gate), pool.planes(layer.layer.layer_idx)
            found_ms += took_ms(partial(layer.layer.kernel, inputs, planes, rows_of))
        return found_ms

    def _fork_ms(self) -> float:
        """Returns the shortest time of the copies that four sequences need to continue from one prompt."""
        self.add(self.prompt(40), Sampling(n=4, temperature=1.0, max_tokens=2, ignore_eos=True))
        plan = self.core.plan()
        while not any(each.kind == "copy" for each in plan.moves):
            self.core.run(plan)
            plan = self.core.plan()
        found_ms = min(took_ms(lambda: self.runner.move(plan.moves)) for _ in range(NUM_TRIES))
        self.core.run(plan)
        self.drain()
        return found_ms

    def _copies_ms(self, num_copies: int, num_states: int) -> float:
        """Returns the shortest time of copying these states `num_copies` times to other memory, past the cache."""
        nbytes, copy = self.runner.pools[1].layout.block_nbytes, streaming_copy()
        assert copy is not None
        sources, targets = (torch.ones(count, nbytes, dtype=torch.uint8) for count in (num_states, num_copies))

        def each() -> None:
            for at, target in enumerate(targets):
                copy(target, sources[at % num_states])

        return min(took_ms(each) for _ in range(NUM_TRIES))


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def took_ms(call: Callable[[], object]) -> float:
    start_s = clock()
    with torch.inference_mode():
        call()
    return 1e3 * (clock() - start_s)
