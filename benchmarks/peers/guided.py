"""A guide's cost per decode step: 16 requests held to a schema beside 16 that are not, step by step.

The model's weights are random, so its output is noise; the vocabulary is real: its tokens are learned from Python's own
standard library, because the cost of masks depends on the vocabulary.
"""

from __future__ import annotations

import json
import sysconfig
import time
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.guided.cases import RECORD
from benchmarks.peers.steps import NUM_SETTLING_STEPS, PROMPT_LEN, Bench
from benchmarks.spec import PeerResult, Spec, child_main
from benchmarks.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.engine.build import build_core
from pd_cluster.model.sampling.guided import Guides
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.text.grammar import Compiler
from pd_cluster.types import Guide, Order, Request, Sampling

NUM_SEQS = 16
EOS_ID = 2
MAX_FILES = 600
ENDLESS = Guide("json", json.dumps({"type": "array", "items": RECORD, "minItems": 100_000}))  # record after record


def learn_tokenizer(vocab_size: int, file: Path) -> None:
    """Learns a byte-level BPE; ids 0 to 2 are special. The same on every machine with the same Python."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted([*library.glob("*.py"), *library.glob("[a-su-z]*/*.py")])[:MAX_FILES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(source) for source in sources], trainer)
    tokenizer.save(str(file))


class Lane(Bench):
    """An engine with a batch of its own: every request has the same guide, or none has one."""

    def __init__(self, spec: Spec, tokenizer_file: Path, guide: Guide | None) -> None:
        super().__init__(*build_core(EngineConfig(model=spec.model, dtype="float32", device="cpu")))
        self._guide = guide
        self.runner.eos_token_ids = frozenset({EOS_ID})
        self.core.guides = Guides(lambda: Compiler(tokenizer_file, self.runner.vocab_size, {EOS_ID}))

    def start(self, num_steps: int, temperature: float) -> None:
        """Runs up to the counted decode steps."""
        for _ in range(NUM_SEQS):
            self._add(NUM_SETTLING_STEPS + num_steps + 2, temperature)
        while self.core.scheduler.waiting or any(not r.output_token_ids for r in self.core.scheduler.running):
            self.core.step()
        for _ in range(NUM_SETTLING_STEPS):
            self.core.step()

    def step_ms(self) -> float:
        start_s = time.perf_counter()
        sampled = self.core.step().sampled
        took_s = time.perf_counter() - start_s
        assert len(sampled) == NUM_SEQS
        return 1e3 * took_s

    def _add(self, max_tokens: int, temperature: float) -> None:
        self.num_requests += 1
        name, seed = f"g{self.num_requests}", self.num_requests
        params = Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=seed, guide=self._guide)
        self.core.scheduler.add(Request(name, Order(self.prompt(PROMPT_LEN), params), arrival_s=float(seed)))


def measure(spec: Spec) -> PeerResult:
    """Measures both lanes, which alternate, so that other load on the machine affects both."""
    torch.set_num_threads(spec.num_threads)
    tokenizer_file = Path(spec.model).parent / "learned_tokenizer.json"
    learn_tokenizer(ModelShape().vocab_size if not spec.quick else QUICK_SHAPE.vocab_size, tokenizer_file)
    lanes = [Lane(spec, tokenizer_file, guide) for guide in (ENDLESS, None)]
    num_steps = 3 if spec.quick else 60
    figures = {}
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        for lane in lanes:
            lane.start(num_steps, temperature)
        pairs = [[lane.step_ms() for lane in lanes] for _ in range(num_steps)]
        for lane in lanes:
            lane.drain()
        guided, unguided = (median(column) for column in zip(*pairs, strict=True))
        figures[f"guided_{name}_16_ms"] = guided
        figures[f"unguided_{name}_16_ms"] = unguided
        figures[f"guided_{name}_16_over_unguided"] = guided / unguided
    return PeerResult(figures=figures)


if __name__ == "__main__":
    child_main(measure)
