"""The tests that `scripts/test.sh --changed` selects."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "changed_tests.py"
spec = importlib.util.spec_from_file_location("changed_tests", SCRIPT)
assert spec is not None
assert spec.loader is not None
changed_tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(changed_tests)
importers = functools.cache(changed_tests.importers)


def chosen(*changed: str, durations: dict[str, float] | None = None, budget_s: float = 1e9) -> list[str]:
    away = changed_tests.distances([*changed], importers())
    found: list[str] = changed_tests.choose(away, durations or {}, budget_s)
    return found


def test_what_is_near_comes_first_and_what_is_far_is_left_out() -> None:
    found = chosen("pd_cluster/kv/block_pool.py")
    assert found.index("tests/unit/test_block_pool.py") < found.index("tests/unit/test_engine_traffic.py")
    assert chosen("pd_cluster/kv/block_pool.py", budget_s=0.0) == ["tests/unit/test_layering.py"]
    times_s = {"tests/unit/test_block_pool.py": 1.0}
    assert "tests/unit/test_block_pool.py" in chosen("pd_cluster/kv/block_pool.py", durations=times_s, budget_s=2.0)
    name = "tests/cluster/test_up.py"
    assert name in chosen(name, durations={name: 1e6}, budget_s=0.0)
    assert "tests/unit/test_routing.py" in chosen("tests/support/router_world.py"), "changes of test helpers count"


def test_a_commit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["changed_tests", "no-such-commit"])
    with pytest.raises(SystemExit, match="no-such-commit"):
        changed_tests.main()


def test_durations_are_those_of_the_newest_cache(tmp_path: Path) -> None:
    """Each half of scripts/test.sh has its own cache of durations, and pytest run by hand has another."""
    for at_s, (name, found) in enumerate(
        {".": {"a": 1.0, "b": 1.0, "c": 1.0}, "one-process": {"a": 2.0, "b": 2.0}, "clusters": {"b": 3.0}}.items()
    ):
        file = tmp_path / name / "v" / "pd_cluster" / "durations"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(found))
        os.utime(file, (at_s, at_s))
    assert changed_tests.durations_of(tmp_path) == {"a": 2.0, "b": 3.0, "c": 1.0}
