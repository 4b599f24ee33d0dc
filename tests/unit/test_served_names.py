"""The names by which clients find the model and its adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pd_cluster.errors import ModelNotFound
from pd_cluster.service.caller import NOBODY
from pd_cluster.service.served_names import ServedNames
from pd_cluster.settings.engine import model_name


def test_a_model_without_a_name_has_its_paths_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    for path in (str(tmp_path / "models" / "tiny"), "../models/tiny", "tiny/", "./tiny/.", "/gone/tiny"):
        assert model_name(path) == "tiny"
    for name in ("org/tiny", "hf:org/tiny", "/"):
        assert model_name(name) == name


def test_the_path_as_given_is_the_same_model() -> None:
    names = ServedNames("/models/tiny", adapters={"french": "d" * 64})
    assert (names.own, names.check(None)) == (["tiny"], "tiny")
    assert [names.check(name) for name in ("tiny", "/models/tiny")] == ["tiny", "/models/tiny"]
    assert [names.variant_of(name) for name in ("/models/tiny", "french")] == ["", "d" * 64]
    with pytest.raises(ModelNotFound, match=r"'/models/' does not exist here; this server has tiny, french"):
        names.check("/models/")


@pytest.mark.parametrize("listed", ["tiny", "/models/tiny"])
def test_a_key_for_the_one_name_is_for_the_other(listed: str) -> None:
    names, caller = ServedNames("/models/tiny"), replace(NOBODY, models=(listed,))
    assert names.for_caller(caller) == ["tiny"]
    assert [names.check(name, caller) for name in ("tiny", "/models/tiny", None)] == ["tiny", "/models/tiny", "tiny"]


def test_given_names_replace_the_paths_end() -> None:
    names = ServedNames("/models/tiny", ["first", "second"])
    assert names.own == ["first", "second"]
    assert names.check("/models/tiny") == "/models/tiny"
    with pytest.raises(ModelNotFound):
        names.check("tiny")
    with pytest.raises(ModelNotFound):
        names.check("/models/tiny", replace(NOBODY, models=("second",)))
