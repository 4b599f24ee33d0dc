"""Runs one engine in a separate process group until it ends or its deadline passes. No process of the group remains.

Knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.engine_messages import PeerResult, Spec
from benchmarks.model_shapes import ModelShape
from pd_cluster.errors import GenerationError, PdClusterError

END_TIMEOUT_S = 5.0
MODEL_DEADLINE_S = 120.0
NUM_LOG_LINES = 15
NOTHING: Mapping[str, str] = {}


class ChildFailed(GenerationError):
    """A child process failed. The message ends with the last lines of its output."""


def run_peer(module: str, spec: Spec, folder: Path, deadline_s: float) -> PeerResult:
    """Runs `module` of the folder peers/. Raises ChildFailed."""
    result_file = run_module(module, spec, folder / module, deadline_s, spec.num_threads)
    try:
        return msgspec.json.decode(result_file.read_bytes(), type=PeerResult)
    except (OSError, msgspec.MsgspecError) as error:
        raise ChildFailed(f"{module} left no result: {error}") from None


def run_module(module: str, spec: msgspec.Struct, place: Path, deadline_s: float, num_threads: int) -> Path:
    """Runs `module` of the folder peers/; returns its file of results, next to `place`. Raises ChildFailed."""
    spec_file, result_file, log = (place.with_suffix(ending) for ending in (".spec", ".result", ".log"))
    result_file.unlink(missing_ok=True)  # from an earlier round
    spec_file.write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", str(spec_file), str(result_file)]
    run_child(command, log, deadline_s, num_threads)
    return result_file


def run_child(command: Sequence[str], log: Path, deadline_s: float, num_threads: int) -> None:
    """Runs a command until it ends, and then ends all processes of its group. Raises ChildFailed."""
    with running_child(command, log, num_threads) as child:
        try:
            code = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"not finished within {deadline_s:g} s; its last lines:\n{last_lines(log)}") from None
    if code:
        raise ChildFailed(f"ended with code {code}; its last lines:\n{last_lines(log)}")


@contextlib.contextmanager
def running_child(
    command: Sequence[str],
    log: Path,
    num_threads: int,
    env: Mapping[str, str] = NOTHING,
    folder: Path | None = None,
    fds: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command during the block, and then ends it and its group. Its standard input is closed when this process
    ends.

    `folder`: its working folder, where it finds modules. `fds`: descriptors that it inherits.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=folder,
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**child_environment(num_threads), **env},
            start_new_session=True,
        )
    try:
        yield child
    finally:
        end_group(child)
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()


def make_model(folder: Path, shape: ModelShape, num_threads: int = 1) -> Path:
    """Makes a model of this shape in `folder`; a child process imports torch for it. Raises ChildFailed."""
    print(f"making a model of {shape.num_parameters / 1e6:.0f} million parameters …", flush=True)
    command = [sys.executable, "-m", "benchmarks.peers.make_model", str(folder / "model"), shape.dump()]
    run_child(command, folder / "make_model.log", MODEL_DEADLINE_S, num_threads)
    return folder / "model"


def child_environment(num_threads: int) -> dict[str, str]:
    """Returns the environment variables, which are the same for all engines."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends the group that the child leads. An empty group is not an error."""
    with contextlib.suppress(ProcessLookupError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_TIMEOUT_S)
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline_s:  # grandchildren may still be exiting
            os.killpg(child.pid, 0)
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join(line[:300] for line in lines[-NUM_LOG_LINES:])


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise, so that children end when this process does."""

    def stop(*_: object) -> None:
        raise PdClusterError("ended by SIGTERM; nothing was reported")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
