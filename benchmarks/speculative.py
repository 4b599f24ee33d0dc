"""`python -m benchmarks speculative`: compares tokens/s with drafts to tokens/s without, and checks the answers.

The model copies, corrects and calls tools. `widened` pads the small model that scripts/train_copy_model.py trains to
125 million parameters, so that acceptance is realistic, and a step costs as much as with a model of this size. One
engine gets requests without and with drafts in turn. Times count from the moment when all requests have their first
token.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import httpx
import msgspec
import torch

from benchmarks.copy_tasks import FIRST_CHARACTER, WORDS, Task, called, chatted, copied, corrected
from benchmarks.figures import begin, finish, result
from benchmarks.mixed_load import answered
from benchmarks.model_shapes import ModelShape
from benchmarks.widened_llama import widened
from pd_cluster.bench.serve_bench import ServeBench, ask_model, sigterm_ends_it, started_cluster
from pd_cluster.client.streaming_client import make_client
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import GenerationError
from pd_cluster.result_tables import Report, Result, counted
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.speculation import Method, Speculation
from pd_cluster.types import Request, RequestSpec, Sampling

SMALL = Path(__file__).parent / "models" / "copy"
SMALL_SHAPE = ModelShape(
    hidden_size=128, num_layers=4, num_heads=2, num_kv_heads=2, intermediate_size=192, vocab_size=1344
)
QUICK_SHAPE = ModelShape(hidden_size=192, num_layers=5, num_heads=4, num_kv_heads=2, vocab_size=1344)
ALONE, SPLIT = "alone", "1P1D"
LENGTH, QUICK_LENGTH, WARMING_LENGTH = 224, 24, 32  # tokens of an answer: usually, with --quick, in a warm-up
WEIGHTS = {"float32": ("dtype", "float32"), "bfloat16": ("dtype", "bfloat16"), "int8": ("quantization", "int8")}
NO_LOSS = 0.97
DRAFT_MODEL: tuple[Method, ...] = ("draft_model",)
NOISE = 6.5  # noise in the padding of the target model; the draft model predicts about 0.8 of its tokens

SALTS = ("plain", "drafting")  # keeps suffix drafts from finding the same answers among earlier outputs
Answers = list[list[int]]


class Kind(NamedTuple):
    """One kind of requests. `predicts`: makes a prediction from a task and its plain answer. `goals`: for one request,
    up to 4, and more requests at a time.
    """

    methods: tuple[Method, ...]
    task: Callable[[random.Random, int], Task]
    predicts: Callable[[random.Random, Task, list[int]], list[int]] | None
    goals: tuple[float, float, float]
    temperature: float = 0.0
    num_earlier: int = 1  # uncounted answers before; if there is only one, it is short


KINDS = {  # kinds with the same methods follow each other, because they share an engine
    "right": Kind((), copied, lambda rng, task, plain: plain, (5.0, 1.8, NO_LOSS)),
    "wrong": Kind((), copied, lambda rng, task, plain: rng.choices(WORDS, k=len(plain)), (NO_LOSS,) * 3),
    "edited": Kind((), corrected, lambda rng, task, plain: task.prompt[1:-1], (4.0, 1.6, NO_LOSS)),
    "ngram": Kind(("ngram",), copied, None, (3.0, 1.6, NO_LOSS)),
    "suffix": Kind(("suffix",), lambda rng, n: called(rng, max(1, n // 56), 2), None, (3.0, 1.6, NO_LOSS), 0.0, 8),
    "chats": Kind(("ngram", "suffix"), chatted, None, (NO_LOSS,) * 3, temperature=1.0),
    "model": Kind(DRAFT_MODEL, copied, None, (1.6, NO_LOSS, NO_LOSS)),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """The command's parameters."""

    kinds: tuple[str, ...]
    batches: tuple[int, ...]
    places: tuple[str, ...]
    weights: str
    rounds: int
    threads: int
    quick: bool

    @property
    def command(self) -> str:
        asked = f"--rounds {self.rounds} --threads {self.threads}{' --quick' * self.quick}"
        lists = {"kinds": self.kinds, "batches": map(str, self.batches), "places": self.places}
        what = " ".join(f"--{name} {','.join(values)}" for name, values in lists.items()) + f" --weights {self.weights}"
        return f"python -m benchmarks speculative {what} {asked}"

    def tasks(self, kind: Kind, batch: int, at: int) -> list[Task]:
        """Makes the requests of a round; rounds below 0 are warm-ups."""
        rng = random.Random(f"{at} {batch}")
        tasks = [kind.task(rng, QUICK_LENGTH if self.quick else LENGTH) for _ in range(batch)]
        return (
            [Task(task.prompt, task.answer[:WARMING_LENGTH]) for task in tasks]
            if at < 0 and kind.num_earlier == 1
            else tasks
        )

    def models(self, folder: Path, methods: tuple[Method, ...]) -> Models:
        """Makes the model and, if the methods need one, the model that drafts for it, unless they exist."""
        shape = QUICK_SHAPE if self.quick else ModelShape()
        noise = NOISE if methods == DRAFT_MODEL else 0.0
        model, small = folder / f"copy-{noise:g}", folder / "small"
        if not model.exists():
            widened(SMALL, model, shape, noise)
        if noise and not small.exists():
            widened(SMALL, small, msgspec.structs.replace(SMALL_SHAPE, vocab_size=shape.vocab_size))
        return Models(model, Speculation(methods=methods, model=str(small) if noise else ""))


class Models(NamedTuple):
    """A model, and the settings of its drafts."""

    folder: Path
    speculation: Speculation


class Asked(NamedTuple):
    """The outcome of requests. `rate`: tokens a second after all requests have their first token."""

    answers: Answers
    rate: float
    num_drafted: int = 0
    num_accepted: int = 0
    tokens_a_step: float | None = None  # tokens of a sequence per step


Case = tuple[str, str, int]  # place, kind, requests at a time
Round = tuple[Asked, Asked]  # results without and with drafts


def results_of(name: str, rounds: Sequence[Round], goal: float) -> Iterator[Result]:
    yield result(f"{name}: without drafts", [plain.rate for plain, _ in rounds], "tokens/s", "higher")
    ratios = [drafting.rate / plain.rate for plain, drafting in rounds]
    yield result(f"{name}: with drafts ÷ without drafts", ratios, "x", "higher", goal)
    if shares := [each.num_accepted / each.num_drafted for _, each in rounds if each.num_drafted]:
        yield result(f"{name}: drafts accepted", shares, "of drafts", "higher")
    if steps := [each.tokens_a_step for _, each in rounds if each.tokens_a_step]:
        yield result(f"{name}: tokens a step", steps, "tokens", "higher")
    yield counted(f"{name}: answers that differ", num_differing(rounds), "answers", 0)


def num_differing(rounds: Sequence[Round]) -> int:
    pairs = (zip(plain.answers, drafting.answers, strict=True) for plain, drafting in rounds)
    return sum(one != other for one, other in itertools.chain(*pairs))


def run(bench: Bench, json_file: str) -> None:
    """Measures and reports. Raises PdClusterError, also if drafts change an answer."""
    begin(json_file)
    torch.set_num_threads(bench.threads)
    started_s, results, found = time.monotonic(), list[Result](), dict[Case, list[Round]]()
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        asyncio.run(measure(bench, Path(folder), found))
    for (place, name, batch), rounds in found.items():
        goal = KINDS[name].goals[0 if batch == 1 else 1 if batch <= 4 else 2]
        results += results_of(f"{place}, {name}, {batch} at a time", rounds, goal)
    title = f"{bench.rounds} rounds, {bench.threads} threads, {time.monotonic() - started_s:.0f} s"
    finish(Report(bench.command, results), title, json_file, bench.quick)
    if num := sum(map(num_differing, found.values())):
        raise GenerationError(f"{num} answers with drafts differ from those without; see the table")


async def measure(bench: Bench, folder: Path, found: dict[Case, list[Round]]) -> None:
    with sigterm_ends_it():
        for place in bench.places:
            for methods, names in itertools.groupby(bench.kinds, lambda name: KINDS[name].methods):
                async with (engine if place == ALONE else cluster)(bench, bench.models(folder, methods)) as asks:
                    for name, batch in itertools.product(names, bench.batches):
                        found[place, name, batch] = await rounds_of(bench, asks, name, batch)
                        print(f"{place}, {name}, {batch} at a time", flush=True)


async def rounds_of(bench: Bench, asks: Engine | Server, name: str, batch: int) -> list[Round]:
    """Sends the requests without and with drafts, in turn."""
    kind, rounds = KINDS[name], list[Round]()
    for at in range(-max(1, kind.num_earlier // batch), bench.rounds):
        tasks, rng = bench.tasks(kind, batch, at), random.Random(at)
        plain = await asks.ask(kind, tasks, None)
        pairs = zip(tasks, plain.answers, strict=True)
        predicted = [kind.predicts(rng, *each) if kind.predicts else [] for each in pairs]
        rounds.append((plain, await asks.ask(kind, tasks, predicted)))
    return rounds[-bench.rounds :]


class Engine:
    """Sends requests together to an engine in this process. `predicted`: predictions, or empty; None: no drafts."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._numbers = itertools.count()

    async def ask(self, kind: Kind, tasks: Sequence[Task], predicted: Answers | None) -> Asked:
        requests = []
        for at, task in enumerate(tasks):
            sampling = Sampling(temperature=kind.temperature, seed=at, max_tokens=len(task.answer), ignore_eos=True)
            prediction = tuple(predicted[at]) if predicted else ()
            drafts = predicted is not None
            order = RequestSpec(task.prompt, sampling, SALTS[drafts], prediction=prediction, may_draft=drafts)
            number = next(self._numbers)
            requests.append(Request(f"r{number}", order, arrival_s=float(number)))
            self._core.scheduler.add(requests[-1])
        while not all(request.output_token_ids for request in requests):
            self._core.step()
        num_early = sum(len(request.output_token_ids) for request in requests)
        steps, (drafted, accepted), start_s = self._core.num_steps, self._drafted(), time.perf_counter()
        while self._core.scheduler.requests:
            self._core.step()
        took_s, steps = time.perf_counter() - start_s, self._core.num_steps - steps
        answers = [request.output_token_ids for request in requests]
        num_tokens = sum(map(len, answers)) - num_early
        drafted, accepted = self._drafted()[0] - drafted, self._drafted()[1] - accepted
        return Asked(answers, num_tokens / took_s, drafted, accepted, num_tokens / len(tasks) / steps)

    def _drafted(self) -> tuple[int, int]:
        """Returns the numbers of tokens that were drafted and accepted so far."""
        counts = self._core.drafting.totals
        return counts.num_draft_tokens, counts.num_accepted_tokens


@asynccontextmanager
async def engine(bench: Bench, models: Models) -> AsyncIterator[Engine]:
    core, _ = build_core(config_of(bench.weights, models))
    yield Engine(core)
    del core
    gc.collect()


def config_of(weights: str, models: Models) -> EngineConfig:
    form: dict[str, Any] = dict([WEIGHTS[weights]])
    return EngineConfig(model=str(models.folder), device="cpu", speculation=models.speculation, **form)


@dataclass(frozen=True, slots=True)
class Server:
    """Sends requests to a cluster over HTTP."""

    client: httpx.AsyncClient
    url: str
    model: str

    async def ask(self, kind: Kind, tasks: Sequence[Task], predicted: Answers | None) -> Asked:
        texts = ["".join(chr(FIRST_CHARACTER + each) for each in said) for said in predicted or [[]] * len(tasks)]
        bodies = [
            {
                "model": self.model,
                "prompt": task.prompt,
                "max_tokens": len(task.answer),
                "temperature": kind.temperature,
                "seed": at,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "speculative": predicted is not None,
                "cache_salt": SALTS[predicted is not None],
                "prediction": {"type": "content", "content": texts[at]},
            }
            for at, task in enumerate(tasks)
        ]
        samples = await asyncio.gather(*(answered(self.client, f"{self.url}/v1/completions", body) for body in bodies))
        tpot_s = mean(sample.tpot_s or sample.e2e_s for sample in samples)
        return Asked([[*sample.token_ids] for sample in samples], len(tasks) / tpot_s)


@asynccontextmanager
async def cluster(bench: Bench, models: Models) -> AsyncIterator[Server]:
    flags = ["--" + "=".join(WEIGHTS[bench.weights])]
    given = {"method": models.speculation.methods, **({"model": each} if (each := models.speculation.model) else {})}
    flags += [f"--speculative-config={json.dumps(given)}"] * bool(given["method"])
    started = started_cluster(ServeBench(model=str(models.folder), more_flags=tuple(flags)))
    async with started as (url, _), make_client(max(bench.batches)) as client:
        yield Server(client, url, (await ask_model(client, url))[0])
