"""Runs each test file in its own process, which shows files that pass only after another file has run.

    python scripts/test_files_alone.py [--jobs N] [FOLDER OR FILE …] [-- PYTEST ARGUMENTS]

Default: the quick tests of tests/unit and tests/model. The processes are forked from one that has already imported the
common modules, which saves most of their start-up time. Prints a line and the end of the output for each file that
fails, and then exits with 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing import connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ("tests/unit", "tests/model")
OK = (0, 5)  # 5: all tests of the file are slow
TAIL_NBYTES = 3000
FILE_LIMIT_S, POLL_S = 1200.0, 5.0
FORK = multiprocessing.get_context("fork")


def files_of(paths: list[str]) -> list[Path]:
    """Returns the test files in `paths`, relative to the repository."""
    found: set[Path] = set()
    for path in (ROOT / each for each in paths):
        found |= {path} if path.is_file() else set(path.rglob("test_*.py"))
    return sorted(each.relative_to(ROOT) for each in found)


def import_common() -> None:
    """Imports modules that each process would spend seconds on. Starts no threads, so forking is safe."""
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401


def run_file(file: Path, output: Path, arguments: list[str]) -> None:
    """Runs in a forked process and ends it with os._exit, so that threads left by a test cannot keep it alive."""
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


class Run:
    """A file's process. `output`: the file with pytest's output."""

    def __init__(self, file: Path, folder: Path, arguments: list[str]) -> None:
        self.file, self.output = file, folder / "-".join(file.parts)
        self.process = FORK.Process(target=run_file, args=(file, self.output, arguments))
        self.process.start()
        self._until_s = time.monotonic() + FILE_LIMIT_S

    @property
    def has_ended(self) -> bool:
        if time.monotonic() > self._until_s:
            self.process.kill()
            self.process.join()
        return not self.process.is_alive()


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
    running: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < given.jobs:
                running.append(Run(waiting.pop(0), Path(folder), arguments))
            connection.wait([each.process.sentinel for each in running], timeout=POLL_S)
            for each in [each for each in running if each.has_ended]:
                running.remove(each)
                if each.process.exitcode not in OK:
                    num_failed += 1
                    tail = each.output.read_text(errors="replace")[-TAIL_NBYTES:] if each.output.exists() else ""
                    print(f"FAILED {each.file}, exit code {each.process.exitcode}\n{tail}", flush=True)
    print(f"{num_files - num_failed} of {num_files} files passed alone")
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
