"""Fixtures for all tests: tiny checkpoints made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.cluster.rank_process import LOOKUPS

for name, value in LOOKUPS.items():  # as rank processes have them, for links between engines in one process
    os.environ.setdefault(name, value)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What shares clusters stays together where tests run on several processes: a file, and all of tests/api."""
    for item in items if config.pluginmanager.hasplugin("xdist") else []:
        folder, name = item.path.parent.name, item.path.name
        item.add_marker(pytest.mark.xdist_group("api" if folder == "api" else name))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("llama")` is the folder of a tiny random model of that architecture."""
    made: dict[tuple[object, ...], Path] = {}

    def make(architecture: str = "llama", seed: int = 0, **changes: object) -> Path:
        from tests.support.checkpoints import make_checkpoint

        key = (architecture, seed, *sorted(changes.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{architecture}-{seed}", numbered=True)
            made[key] = make_checkpoint(folder, architecture, seed, **changes)
        return made[key]

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of tiny models in the test's own process: several threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
