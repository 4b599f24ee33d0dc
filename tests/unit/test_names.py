"""Names use the field's terms, file names are unique, and a folder fits on a screen."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("pd_cluster", "ranktable_tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
# Words once coined here -> today's term. No name of a file, class, function or argument may contain them.
COINED = {
    "trip": "link_probe",
    "trips": "link_probe",
    "outbox": "output_batcher",
    "inlet": "output_dispatcher",
    "entrance": "admission",
    "visitor": "RequestOwner",
    "party": "PromptGroup",
    "room": "capacity, or admission_queue",
    "steering": "pause_control",
    "doorman": "connection_limiter",
    "door": "listener or http_protocol",
    "patience": "step_delay",
    "crossing": "network_policy",
    "tails": "tail_latency",
    "borrowing": "core_lending",
    "lent": "core_lending",
    "judging": "reranking",
    "looking": "view_commands",
}
# Ordinary words, once used in names of files and classes, for which the field has better terms.
UNCLEAR = {
    "endings": "stream_end",
    "attempts": "retry",
    "gate": "middleware",
    "turns": "lora_rotation",
    "pace": "step_rate",
    "gather": "lane_barrier",
    "home": "core_affinity",
    "sense": "weight_sanity",
    "trial": "unlisted_model_check",
    "fit": "weight_check",
    "means": "HandoverContext",
    "side": "LocalEndpoint",
    "spacing": "stream_interval",
    "edge": "serving_context",
    "marks": "event_log",
    "alone": "file_lock",
    "order": "RequestSpec",
}
# (word, path prefix): places where an unclear word is the field's term.
FIELD_TERMS = {
    ("fit", "pd_cluster/costs/"),  # fitting a regression
    ("gate", "pd_cluster/model/"),  # the gate of experts or of a gated layer
}
FOLDERS = ("cluster", "engine", "model", "service", "api")
MAX_ENTRIES = 15
SHARED_NAMES = {"__init__", "build", "worker"}  # files with one job in each package
DEVICES = re.compile(r"pd_cluster/model/(?:kernels/\w+|layers)/")  # implementations of one interface may share names


def words_of(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def definitions(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields each name that a file defines, and whether it is the file's or a class's name."""
    yield path.stem, True
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.ClassDef():
                yield node.name, True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, False
            case ast.arg():
                yield node.arg, False
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, False
            case ast.AnnAssign(target=ast.Name()):
                yield node.target.id, False


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def entries_of(folder: Path) -> list[Path]:
    """Lists a folder's files and non-empty folders, because moved folders may leave compiled files behind."""
    own = [path for path in folder.iterdir() if path.name not in ("__init__.py", "__pycache__")]
    return [path for path in own if path.is_file() or any(path.glob("*.*"))]


def test_no_coined_word_in_a_name() -> None:
    faults = []
    for path in SOURCES:
        place = place_of(path)
        for name, is_loud in definitions(path):
            for word in words_of(name):
                allowed = any(word == term and place.startswith(prefix) for term, prefix in FIELD_TERMS)
                if word in COINED or (is_loud and word in UNCLEAR and not allowed):
                    faults.append(f"{place}: {name}: say {COINED.get(word) or UNCLEAR[word]}")
    assert not faults, "\n".join(sorted(set(faults)))


def test_no_folder_has_too_many_entries() -> None:
    full = {}
    for top in FOLDERS:
        for folder in [ROOT / "pd_cluster" / top, *(ROOT / "pd_cluster" / top).rglob("*/")]:
            if folder.name not in ("static", "__pycache__") and len(entries := entries_of(folder)) > MAX_ENTRIES:
                full[place_of(folder)] = len(entries)
    assert not full


def test_no_two_files_share_a_name() -> None:
    places = defaultdict(list)
    for path in (ROOT / "pd_cluster").rglob("*.py"):
        places[path.stem].append(place_of(path))
    repeated = {
        name: found
        for name, found in places.items()
        if len(found) > 1 and name not in SHARED_NAMES and not all(map(DEVICES.match, found))
    }
    assert not repeated
