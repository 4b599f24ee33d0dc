"""`python -m benchmarks guided`: the guide library, and xgrammar if it is installed, on the same guides.

Each runs in a process of its own with the same vocabulary of 32,000 tokens: common guides all in one, hostile guides
each in one that is stopped after a deadline. `engine --workload guided` measures a guide's cost to the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.child import PEERS_FOLDER, child_environment, run_child
from benchmarks.guided.cases import COUNTEREXAMPLES, FEATURES, HOSTILE, MID_SIZE, Case
from pd_cluster.errors import GenerationError
from pd_cluster.tables import Report, Result, check_writable, print_table

VOCAB_SIZE = 32_000
DEADLINE_S = 300.0
HOSTILE_DEADLINE_S = 10.0  # including the start
LEARN = "from pathlib import Path; import sys; from benchmarks.peers.guided import learn_tokenizer as l; "
DEFAULT_PEERS_DIR = Path(__file__).parents[3] / ".venv-peers"
LIBRARIES = {"llguidance": "", "xgrammar": "xgrammar"}  # name -> environment, "" for this one

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """One library's lines by case; a hostile case without one was stopped."""

    mid_size: dict[str, Line]
    features: dict[str, Line]
    hostile: dict[str, Line]


def run(peers_dir: str = "", json_path: str = "") -> None:
    check_writable(json_path)
    folder_of_peers = Path(peers_dir).expanduser().absolute() if peers_dir else DEFAULT_PEERS_DIR
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as name:
        folder = Path(name)
        tokenizer = folder / "tokenizer.json"
        learn = f"{LEARN}l({VOCAB_SIZE}, Path(sys.argv[1]))"
        run_child([sys.executable, "-c", learn, str(tokenizer)], folder / "learn.log", DEADLINE_S, 2)
        for library, environment in LIBRARIES.items():
            python = str(folder_of_peers / environment / "bin" / "python") if environment else sys.executable
            if not Path(python).exists():
                print(f"note: {library} is not in {folder_of_peers}: PEERS=xgrammar sh scripts/setup_bench_peers.sh")
                continue
            found[library] = measured(library, python, tokenizer, folder)
    report = Report(
        "python -m benchmarks guided", [r for library, each in found.items() for r in results(library, each)]
    )
    report.show("guides, vocabulary of 32,000")
    show_cases(found)
    if json_path:
        report.write(json_path)


def measured(library: str, python: str, tokenizer: Path, folder: Path) -> Found:
    def lines(cases: Sequence[Case], deadline_s: float) -> dict[str, Line]:
        return {line["name"]: line for line in run_cases(library, python, tokenizer, folder, cases, deadline_s)}

    mid_size = lines([(name, "json", json.dumps(schema)) for name, schema in MID_SIZE.items()], DEADLINE_S)
    features = lines([(name, "json", json.dumps(schema)) for name, schema in FEATURES.items()], DEADLINE_S)
    hostile: dict[str, Line] = {}
    for case in HOSTILE:
        hostile |= lines([case], HOSTILE_DEADLINE_S)
    return Found(mid_size, features, hostile)


def run_cases(
    library: str, python: str, tokenizer: Path, folder: Path, cases: Sequence[Case], deadline_s: float
) -> list[Line]:
    """Returns the lines that arrived in time. Raises GenerationError if the library cannot even start."""
    file = folder / "cases.json"
    with_counterexamples = [[*case, COUNTEREXAMPLES.get(case[0], "")] for case in cases]
    file.write_text(json.dumps(with_counterexamples), encoding="utf-8")
    ours = ["-m", "benchmarks.peers.guide_library"]
    command = [python, *(["-P", str(PEERS_FOLDER / "guide_library.py")] if LIBRARIES[library] else ours)]
    child = subprocess.Popen(
        [*command, library, str(tokenizer), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(1),
    )
    try:
        output, errors = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        output, errors = child.communicate()
    found = [json.loads(line) for line in output.splitlines()]
    if not found:
        raise GenerationError(f"{library} does not run: {errors.strip()[-300:]}")
    return found[1:]


def results(library: str, found: Found) -> list[Result]:
    good = [line for line in found.mid_size.values() if not line["error"]]
    masks = sorted(value for line in good for value in line["masks_ms"])
    accepted = [line for line in found.features.values() if not line["error"]]
    num_wrong = sum(line["lets_through"] for line in accepted)
    ended = sum(case in found.hostile for case, _, _ in HOSTILE)
    worst = max((max(line.get("masks_ms", []), default=0.0) for line in found.hostile.values()), default=0.0)
    figures: list[tuple[str, float, str]] = [
        ("mid-size schemas that compile", len(good), f"of {len(MID_SIZE)}"),
        ("compiling a mid-size schema, median", median(line["compile_ms"] for line in good), "ms"),
        ("compiling a mid-size schema, longest", max(line["compile_ms"] for line in good), "ms"),
        ("a mask, mean", 1e3 * mean(masks), "us"),
        ("a mask, p99", 1e3 * masks[int(0.99 * len(masks))], "us"),
        ("JSON schema features kept to", len(accepted) - num_wrong, f"of {len(FEATURES)}"),
        ("JSON schema features taken and not kept to", num_wrong, f"of {len(FEATURES)}"),
        ("hostile guides that had an end in 10 s", ended, f"of {len(HOSTILE)}"),
        ("hostile guides: longest mask", worst, "ms"),
        ("hostile guides: most memory", max(line["rss_mib"] for line in found.hostile.values()), "MiB"),
    ]
    return [
        Result(name=f"{library}: {name}", value=float(f"{value:.4g}"), unit=unit, better="lower")
        for name, value, unit in figures
    ]


def show_cases(found: dict[str, Found]) -> None:
    """Prints each library's results for each feature and for each hostile guide."""

    def said(line: Line | None) -> str:
        if line is None:
            return "stopped"
        if line["error"]:
            return f"refused: {line['error'][:60]}"
        return "NOT KEPT TO" if line["lets_through"] else f"{line['compile_ms']:.1f} ms"

    rows = [[name, *(said(each.features.get(name)) for each in found.values())] for name in FEATURES]
    print_table("JSON schema features", ["", *found], rows, right=())
    rows = [[name, *(said(each.hostile.get(name)) for each in found.values())] for name, _, _ in HOSTILE]
    print_table("hostile guides", ["", *found], rows, right=())
