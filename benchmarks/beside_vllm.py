"""`python -m benchmarks speculative --vllm PYTHON`: compares n-gram drafts here and in vLLM for CPUs.

Both decode the same prompts with the same model, one after the other, with and without drafts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.child_process import run_child
from benchmarks.copy_tasks import Task
from benchmarks.figures import begin, finish, result
from benchmarks.speculative import KINDS, Asked, Bench, engine
from pd_cluster.result_tables import Report, Result, counted

NGRAM = {"num_speculative_tokens": 16, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
DEADLINE_S = 900.0
GOAL = 1.2


class DraftSpeeds(NamedTuple):
    """Tokens a second in each round, and the number of answers that drafts change."""

    plain: list[float]
    drafting: list[float]
    num_differing: int


def run(bench: Bench, python: str, json_file: str) -> None:
    begin(json_file)
    results = list[Result]()
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        models = bench.models(Path(folder), KINDS["ngram"].methods)
        for batch in bench.batches:
            rounds = [bench.tasks(KINDS["ngram"], batch, at) for at in range(-1, bench.rounds)]
            theirs = vllms(python, models.folder, rounds, bench.threads, Path(folder))
            ours = asyncio.run(own(bench, Path(folder), rounds))
            results += compared(f"{batch} at a time", ours, theirs)
    command = f"{bench.command} --vllm PYTHON"
    finish(Report(command, results), f"{bench.rounds} rounds, {bench.threads} threads", json_file, bench.quick)


async def own(bench: Bench, folder: Path, rounds: Sequence[Sequence[Task]]) -> DraftSpeeds:
    kind, pairs = KINDS["ngram"], list[tuple[Asked, Asked]]()
    async with engine(bench, bench.models(folder, kind.methods)) as asks:
        for tasks in rounds:
            pairs.append((await asks.ask(kind, tasks, None), await asks.ask(kind, tasks, [])))
    differing = (a != b for one, other in pairs for a, b in zip(one.answers, other.answers, strict=True))
    return DraftSpeeds([one.rate for one, _ in pairs[1:]], [other.rate for _, other in pairs[1:]], sum(differing))


def vllms(python: str, model: Path, rounds: Sequence[Sequence[Task]], threads: int, folder: Path) -> DraftSpeeds:
    """Runs peers/vllm_drafts.py in a Python that has vLLM. Raises ChildFailed."""
    length = len(rounds[-1][0].answer)
    asked = [[task.prompt for task in tasks] for tasks in rounds]
    spec: dict[str, Any] = {"model": str(model), "rounds": asked, "max_tokens": length, "ngram": NGRAM}
    spec["max_model_len"] = 2 * length + 16
    given, found = folder / "vllm.spec", folder / "vllm.result"
    given.write_text(json.dumps(spec))
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    script = Path(__file__).parent / "peers" / "vllm_drafts.py"
    variables = [f"VLLM_CPU_OMP_THREADS_BIND={cores}", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1"]
    run_child(
        ["env", *variables, python, str(script), str(given), str(found)], folder / "vllm.log", DEADLINE_S, threads
    )
    plain, drafting = json.loads(found.read_text())
    num_tokens = (length - 1) * len(rounds[-1])
    rates, drafting_rates = ([num_tokens / took_s for took_s in each["seconds"]] for each in (plain, drafting))
    answers = (itertools.chain(*each["answers"]) for each in (plain, drafting))
    return DraftSpeeds(rates, drafting_rates, sum(one != other for one, other in zip(*answers, strict=True)))


def compared(name: str, ours: DraftSpeeds, theirs: DraftSpeeds) -> Iterator[Result]:
    for who, side in (("ours", ours), ("vLLM", theirs)):
        yield result(f"{name}, {who}: without drafts", side.plain, "tokens/s", "higher")
        yield result(f"{name}, {who}: with n-gram drafts", side.drafting, "tokens/s", "higher")
        goal = 0 if side is ours else None
        yield counted(f"{name}, {who}: answers that differ with drafts", side.num_differing, "answers", goal)
    times = [one / other for one, other in zip(ours.drafting, theirs.drafting, strict=True)]
    yield result(f"{name}: ours with drafts ÷ vLLM with drafts", times, "x", "higher", GOAL)
