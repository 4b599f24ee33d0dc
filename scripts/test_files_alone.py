"""Runs each test file in a process of its own, so that no file depends on what another one has left.

    python scripts/test_files_alone.py [--jobs N] [FOLDER OR FILE …] [-- PYTEST ARGUMENTS]

Default: the quick tests of tests/unit and tests/model. Processes are forked from one that has imported what most tests
import, which saves most of their start. Prints a line for each file that fails, with the end of its output; exit code 1
if there is any.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ("tests/unit", "tests/model")
OK = (0, 5)  # 5: all tests of the file are slow
TAIL_NBYTES = 3000


def files_of(paths: list[str]) -> list[Path]:
    """Returns the test files in `paths`, relative to the repository."""
    found: set[Path] = set()
    for path in (ROOT / each for each in paths):
        found |= {path} if path.is_file() else set(path.rglob("test_*.py"))
    return sorted(each.relative_to(ROOT) for each in found)


def import_common() -> None:
    """Imports what would otherwise take each process seconds. No threads start, so that forks are safe."""
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401


def start(file: Path, output: Path, arguments: list[str]) -> int:
    """Forks a process that runs the file; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        import pytest

        status = int(pytest.main([str(file), "-q", "-p", "no:cacheprovider", *arguments]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs each test file in a process of its own.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("paths", nargs="*", default=list(DEFAULT))
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given = parser.parse_args(sys.argv[1:split])
    arguments = sys.argv[split + 1 :] or ["-m", "not slow"]
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT))
    import_common()
    waiting = files_of(given.paths)
    num_files, num_failed = len(waiting), 0
    running: dict[int, tuple[Path, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < given.jobs:
                file = waiting.pop(0)
                output = Path(folder) / f"{file.stem}.txt"
                running[start(file, output, arguments)] = file, output
            pid, status = os.wait()
            if pid not in running:
                continue
            file, output = running.pop(pid)
            if os.waitstatus_to_exitcode(status) not in OK:
                num_failed += 1
                print(f"FAILED {file}\n{output.read_text(errors='replace')[-TAIL_NBYTES:]}", flush=True)
    print(f"{num_files - num_failed} of {num_files} files passed alone")
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
