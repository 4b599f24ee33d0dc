"""`python -m benchmarks overload --give-up`: what is left of the capacity where clients leave before their answers.

The same scheduler, made-up workers and arrivals as overload.py. Every load is met by patient clients and by those that
leave so many seconds after they asked; from one address without API keys, and from two tenants with keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.router.overload import CLIENT_TIMEOUT_S, KEYS, SHAPES, STEP_S, OverloadBench, Run, Shape, run_loads
from benchmarks.router.targets import MODEL_NAME, NUM_DECODE, NUM_PREFILL, own_scheduler
from pd_cluster.bench.serve import sigterm_ends_it
from pd_cluster.cluster.processes.launch import Launch
from pd_cluster.cluster.processes.ports import free_port_pair
from pd_cluster.errors import ConfigError
from pd_cluster.tables import Report, Result, check_writable, percentile

LOADS = (1.0, 2.0, 3.0, 5.0)  # times the capacity
GOAL_LOAD, GOAL = 3.0, 0.85  # of what is served at the capacity


def give_up_times(text: str) -> tuple[float, ...]:
    """Reads `--give-up`: seconds, separated by commas; 0 for clients that stay. Raises ConfigError."""
    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise ConfigError(f"--give-up {text!r}: expected seconds such as 0,2,10") from None
    if any(each < 0 for each in found):
        raise ConfigError(f"--give-up {text!r}: seconds are not negative; 0 for clients that stay")
    return found


async def run(bench: OverloadBench, give_up: Sequence[float], json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: a scheduler that does not start."""
    check_writable(json_path)
    results: list[Result] = []
    with sigterm_ends_it(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        for shape in SHAPES:
            for has_keys in (False, True) if shape.name in bench.shapes else ():
                for give_up_s in give_up:
                    results += _results(
                        shape, has_keys, give_up_s, await _runs(bench, shape, has_keys, give_up_s, folder)
                    )
    command = f"{bench.command} --give-up {','.join(f'{each:g}' for each in give_up)}"
    report = Report(command, results)
    report.show(f"made-up workers that a clock limits, {bench.seconds:g} s for each run")
    if json_path:
        report.write(json_path)


async def _runs(bench: OverloadBench, shape: Shape, has_keys: bool, give_up_s: float, folder: str) -> list[list[Run]]:
    """Returns the runs of each load, one for each tenant."""
    found = []
    for load in LOADS:
        arguments = [] if bench.max_queue_s is None else ["--max-queue-time", f"{bench.max_queue_s:g}"]
        launch = Launch(
            num_prefill=NUM_PREFILL,
            num_decode=NUM_DECODE,
            port=free_port_pair(),
            served_model_names=[MODEL_NAME],
            arguments=arguments,
            api_keys=list(KEYS) if has_keys else [],
        )
        loads = dict.fromkeys(KEYS, (load / 2, 1)) if has_keys else {"": (load, 1)}
        timeout_s = give_up_s or CLIENT_TIMEOUT_S
        with own_scheduler(Path(folder), STEP_S, launch, shape.pace) as target:
            runs = await run_loads(bench, shape, f"{load:g} x", target, loads, timeout_s)
        found.append(runs)
        print(_line(shape, has_keys, give_up_s, load, runs), flush=True)
    return found


def _served(runs: Sequence[Run]) -> float:
    return sum(run.goodput for run in runs)


def _refused(runs: Sequence[Run]) -> float:
    asked = sum(len(run.counted()) for run in runs)
    return sum(len(run.refused) for run in runs) / asked if asked else 0.0


def _answer_s(runs: Sequence[Run], percent: float) -> float | None:
    return percentile([sample.e2e_s for run in runs for sample in run.complete], percent)


def _name(shape: Shape, has_keys: bool, give_up_s: float) -> str:
    stay = f"leave after {give_up_s:g} s" if give_up_s else "stay"
    return f"{shape.name}, {'two keys' if has_keys else 'no keys'}, clients {stay}"


def _line(shape: Shape, has_keys: bool, give_up_s: float, load: float, runs: Sequence[Run]) -> str:
    told = [f"{value:.2f} s" if value is not None else "-" for value in (_answer_s(runs, p) for p in (50, 99))]
    return (
        f"{_name(shape, has_keys, give_up_s)}, {load:g} x: goodput {_served(runs):.3f}, 429 {_refused(runs):.0%}, "
        f"answered after p50 {told[0]}, p99 {told[1]}"
    )


def _results(shape: Shape, has_keys: bool, give_up_s: float, found: Sequence[Sequence[Run]]) -> Iterator[Result]:
    name, base = _name(shape, has_keys, give_up_s), _served(found[0])
    for load, runs in zip(LOADS, found, strict=True):
        at, number, served = f"{name}, {load:g} x", sum(len(run.ended()) for run in runs), _served(runs)
        late_s = _answer_s(runs, 99)
        yield Result(name=f"{at}: goodput", value=served, unit="of capacity", better="higher", samples=number)
        yield Result(name=f"{at}: 429", value=_refused(runs), unit="of asked", better="lower", samples=number)
        yield Result(name=f"{at}: answered, p99", value=late_s, unit="s", better="lower", samples=number)
        if load > LOADS[0] and base:
            goal = GOAL if load == GOAL_LOAD else None
            ratio = served / base
            yield Result(
                name=f"{at}: goodput, to 1 x", value=ratio, unit="x", better="higher", goal=goal, samples=number
            )
