"""Compiles the kernels once for this machine, and caches the result in the user's cache folder.

The name of the compiled file identifies all its inputs. Only one of several concurrent processes builds the file, and
the others never see an unfinished one. Knows nothing of tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # infinities and NaN are still computed correctly
)
COMPILE_DEADLINE_S = 180.0  # compilation usually takes seconds, but longer if many processes share a core
VERSION_DEADLINE_S = 60.0
POLL_S = 0.05
MOST_TRIES = 3  # maximum number of compilations if sources keep changing
OPENMP = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


class KernelsUnavailable(Exception):
    """The reason why the kernels cannot run here."""


def are_wanted() -> bool:
    return os.environ.get("PD_CLUSTER_CPU_KERNELS", "1") != "0"


def load(flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """Loads the kernels. Raises KernelsUnavailable."""
    runtime = openmp_runtime()
    library = ctypes.CDLL(str(build(flags)))
    library.pd_init.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.pd_init.restype = None
    library.pd_init(
        ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p), ctypes.cast(runtime.GOMP_barrier, ctypes.c_void_p)
    )
    return library


def openmp_runtime() -> ctypes.CDLL:
    """Returns the OpenMP library that torch uses: two thread pools that spin on the same cores would be very slow."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text("utf-8").splitlines()}
    found = sorted(path for path in paths if OPENMP.search(path))
    of_torch = [path for path in found if "/torch/" in path or "/torch.libs/" in path] or found
    if len(of_torch) != 1:
        raise KernelsUnavailable(f"{len(of_torch)} OpenMP libraries are loaded instead of one: {of_torch}")
    runtime = ctypes.CDLL(of_torch[0])
    if not hasattr(runtime, "GOMP_parallel") or not hasattr(runtime, "GOMP_barrier"):
        raise KernelsUnavailable(f"{of_torch[0]} has no GOMP_parallel")
    return runtime


def identity() -> str:
    """Returns a text that identifies the kernels and their processor; "" without kernels."""
    try:
        return build(FLAGS).name if are_wanted() else ""
    except KernelsUnavailable:
        return ""


def build(flags: tuple[str, ...]) -> Path:
    """Returns the path of the shared library; compiles it unless it is cached. Raises KernelsUnavailable."""
    compiler = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("cc")
    if compiler is None:
        raise KernelsUnavailable("no C compiler (gcc or cc) on PATH")
    for _ in range(MOST_TRIES):
        target = _target(compiler, flags)
        if _is_there(target):
            return target
        with _turn(target):
            if _is_there(target) or _compile(compiler, flags, target):
                return target
    raise KernelsUnavailable(f"{FOLDER} changed during each of {MOST_TRIES} compilations")


def _is_there(target: Path) -> bool:
    return target.is_file() and not target.is_symlink()


@contextlib.contextmanager
def _turn(target: Path) -> Iterator[None]:
    """Lets only one process at a time compile this file, because a cluster's processes start together.

    Waits at most as long as a compilation may take. Raises KernelsUnavailable.
    """
    lock, until_s = target.with_suffix(".lock"), time.monotonic() + COMPILE_DEADLINE_S
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise KernelsUnavailable(f"cannot write to {target.parent}: {error}") from error
    try:
        while time.monotonic() < until_s:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(POLL_S)
        yield
        lock.unlink(missing_ok=True)  # processes that waited find the compiled file
    finally:
        os.close(fd)


def _target(compiler: str, flags: tuple[str, ...]) -> Path:
    return cache_folder() / f"kernels-{_fingerprint(compiler, flags)}.so"


def cache_folder() -> Path:
    """Returns a folder that only this user can access, because files in it are executed."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pd-cluster"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError) as error:
        raise KernelsUnavailable(f"no cache folder: {error}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise KernelsUnavailable(f"{folder} belongs to or can be written by other users")
    return folder


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    """Hashes the source, the flags, the compiler and the CPU's features."""
    digest = hashlib.sha256(repr(flags).encode())
    for file in sorted(FOLDER.glob("*.[ch]")):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(_run([compiler, "--version"], VERSION_DEADLINE_S).encode())
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part"):
            digest.update(line.encode())
        elif not line:  # the features of the first core are enough
            break
    return digest.hexdigest()[:24]


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> bool:
    """Compiles `target`. If a source changes meanwhile, does not make `target`, whose name would be wrong.

    Returns whether `target` exists.
    """
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".kernels-", suffix=".so")
    except OSError as error:
        raise KernelsUnavailable(f"cannot write to {target.parent}: {error}") from error
    os.close(handle)
    try:
        _run([compiler, *flags, str(FOLDER / "kernels.c"), "-o", name, "-lm"], COMPILE_DEADLINE_S)
        if _target(compiler, flags) != target:
            return False
        os.replace(name, target)
        return True
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str], deadline_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise KernelsUnavailable(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[:300]}")
    return done.stdout
