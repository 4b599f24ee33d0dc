"""Fixtures for all tests: tiny checkpoints made once per session."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import certifi
import pytest

from pd_cluster.cluster.processes.port_reservations import FOR_LIFE
from pd_cluster.cluster.processes.rank_process import LOOKUPS
from pd_cluster.native import build
from tests.support.gpu_guard import for_cuda

MOST_DESCRIPTORS = 400
COROUTINE_LIMIT_S = 250.0  # of a test's own waiting; pytest-timeout ends what blocks the loop

# For all tests, since clusters with other variables need a preloader of their own, which takes seconds to start.
os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"  # ms
for name, value in LOOKUPS.items():  # as in rank processes, for links between engines in one process
    os.environ.setdefault(name, value)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps tests that share clusters together under --dist loadfile: a file's tests, and all of tests/api."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByClusters(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "api" if nodeid.startswith("tests/api/") else str(super()._split_scope(nodeid))

    return ByClusters(config, log)


@pytest.fixture(scope="session", autouse=True)
def _own_clusters(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the records of this session's clusters apart from those of others, which commands would find, too."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="session", autouse=True)
def _few_descriptors() -> Iterator[None]:
    """Tests of one process leave some hundred descriptors at most, besides their reserved ports.

    More would be those of objects that nobody ends.
    """
    yield
    gc.collect()
    left = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    kinds = Counter(re.sub(r"[0-9a-f]{2,}|[0-9]", "N", os.readlink(each)) for each in left if os.path.lexists(each))
    assert len(left) - len(FOR_LIFE) < MOST_DESCRIPTORS, kinds.most_common(8)


@pytest.fixture(scope="session", autouse=True)
def _one_certificate_store() -> Iterator[None]:
    """Clients of plain HTTP share the certificates that they never use, which take each 20 ms of CPU to read."""
    read = ssl.create_default_context
    usual = cache(partial(read, cafile=certifi.where()))

    def create(*args: Any, **named: Any) -> ssl.SSLContext:
        return usual() if (args, named) == ((), {"cafile": certifi.where()}) else read(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create)
        yield


class Durations:
    """Records in pytest's cache how long each file took, for scripts/changed_tests.py."""

    KEY = "pd_cluster/durations"

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._took_s: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took_s[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self._config, "cache", None)  # -p no:cacheprovider
        if cache is not None and not self._config.getoption("keyword"):
            cache.set(self.KEY, cache.get(self.KEY, {}) | {name: round(s, 2) for name, s in self._took_s.items()})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="K/N: of N parts of about as many tests, by files, the K-th")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of one part, after those that -m and -k leave. Files stay whole: their tests share clusters."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", config.getoption("part"))
    if found is None or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--part {config.getoption('part')}: expected K/N with K at most N")
    part, sizes = int(found[1]) - 1, [0] * int(found[2])
    of_file: dict[Path, int] = {}
    for path, number in Counter(item.path for item in items).most_common():
        of_file[path] = sizes.index(min(sizes))
        sizes[of_file[path]] += number
    others = [item for item in items if of_file[item.path] != part]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if of_file[item.path] == part]


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: it would examine a million objects that stay, again and again
    if not hasattr(config, "workerinput"):  # with xdist, only in the process that collects reports
        config.pluginmanager.register(Durations(config))
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):  # processes that run tests
        guard = for_cuda()
        if guard is not None:
            config.pluginmanager.register(guard)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles the kernels before a test's time limit runs: seconds of CPU, and minutes beside other work."""
    if not hasattr(session.config, "workerinput"):  # with xdist before its processes start, which would all compile
        build.identity()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Runs a test that is a coroutine function in an event loop of its own."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = in_a_loop(item.obj)


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), COROUTINE_LIMIT_S))

    return run


def pytest_collection_finish() -> None:
    """Spares the garbage collector a million objects that live to the end: of imports, and the tests themselves."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns `checkpoint("llama")` as the folder of a tiny random model of that architecture."""
    made: dict[tuple[object, ...], Path] = {}

    def make(architecture: str = "llama", seed: int = 0, **changes: object) -> Path:
        from tests.support.checkpoints import make_checkpoint

        key = (architecture, seed, *sorted(changes.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{architecture}-{seed}", numbered=True)
            made[key] = make_checkpoint(folder, architecture, seed, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Path:
    """Returns a tiny Llama whose four query heads share two KV heads. Many modules have another model."""
    return checkpoint("llama")


@pytest.fixture
def freed() -> Iterator[None]:
    """Frees wide models after the test: they are in cycles, which Python would collect only gigabytes later."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def one_preloader() -> Iterator[None]:
    """Lets engines of worker processes fork their ranks from the preloader of this process's clusters.

    It starts here, since a preloader ends with the thread that starts it.
    """
    from pd_cluster.cluster.processes.launch_preloader import LaunchPreloader
    from pd_cluster.offline import split_cluster
    from tests.support.cluster import shared_preloader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_cluster, "LaunchPreloader", partial(LaunchPreloader, given=shared_preloader()))
        yield


@pytest.fixture
def kept_threads() -> Iterator[None]:
    """Restores torch's number of threads after the test."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(kept_threads: None) -> None:
    """Limits tiny models in the test's own process to one thread: several would only wait for each other."""
    import torch

    torch.set_num_threads(1)
