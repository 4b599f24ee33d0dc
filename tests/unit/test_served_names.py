"""The names under which clients find the model and its adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pd_cluster.errors import ConfigError, ModelNotFound
from pd_cluster.extras.key_file.key_file import checked
from pd_cluster.service.callers.caller import NOBODY
from pd_cluster.service.callers.served_names import ServedNames
from pd_cluster.settings.engine_config import model_name
from pd_cluster.settings.lora_settings import lora_module
from pd_cluster.settings.model_names import fault_of_name
from pd_cluster.settings.request_settings import RequestSettings
from pd_cluster.settings.serve_options import ServeOptions


def test_a_model_without_a_name_has_its_paths_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    for path in (str(tmp_path / "models" / "tiny"), "../models/tiny", "tiny/", "./tiny/.", "/gone/tiny"):
        assert model_name(path) == "tiny"
    for name in ("org/tiny", "hf:org/tiny", "/"):
        assert model_name(name) == name


MISLEADING = ["french\u202ehsilgne", "a\u2066b", "tiny\u200b", "\ufefftiny", "ti\u00adny", "tiny\U000e0041", "tiny\n"]
MISLEADING += ["\x1b[2Jtiny", "a\u2028b", "a\u00a0b", "\ue000", "a\U000e0fff", "\ud800", "tiny\u3164", "tiny\ufe0f"]
MISLEADING += ["tiny ", "cafe\u0301"]  # a trailing space, and a decomposed character


@pytest.mark.parametrize("name", MISLEADING, ids=ascii)
def test_names_that_mislead_are_refused_wherever_they_are_given(name: str, tmp_path: Path) -> None:
    faults: list[ConfigError] = []
    for give in (
        lambda: lora_module("lora_modules", name, "/x"),
        lambda: ServeOptions(served_model_name=[name]).read(RequestSettings),
        lambda: checked("models", [name], "keys[0].models: "),
        lambda: model_name(f"/models/{name}"),
    ):
        with pytest.raises(ConfigError) as caught:
            give()
        faults.append(caught.value)
    for error in faults:
        assert str(error).isprintable(), "the error must not itself show the misleading name"
    assert "--served-model-name" in str(faults[-1])


def test_names_of_all_scripts_are_fine() -> None:
    names = ["tiny", "org/tiny-7B", "模型", "नमूना", "模型 v2", "caf\u00e9", "نموذج", "😀", "a b"]
    assert {name: fault_of_name(name) for name in names} == dict.fromkeys(names, "")


def test_the_path_as_given_is_the_same_model() -> None:
    names = ServedNames("/models/tiny", adapters={"french": "d" * 64})
    assert (names.own, names.check(None)) == (["tiny"], "tiny")
    assert [names.check(name) for name in ("tiny", "/models/tiny")] == ["tiny", "/models/tiny"]
    assert [names.variant_of(name) for name in ("/models/tiny", "french")] == ["", "d" * 64]
    with pytest.raises(ModelNotFound, match=r"'/models/' does not exist; this server has tiny, french"):
        names.check("/models/")


def test_a_key_for_the_one_name_is_for_the_other() -> None:
    names = ServedNames("/models/tiny")
    for listed in ("tiny", "/models/tiny"):
        caller = replace(NOBODY, models=(listed,))
        assert names.for_caller(caller) == ["tiny"]
        assert [names.check(name, caller) for name in ("tiny", "/models/tiny", None)] == [
            "tiny",
            "/models/tiny",
            "tiny",
        ]


def test_given_names_replace_the_paths_end() -> None:
    names = ServedNames("/models/tiny", ["first", "second"])
    assert names.own == ["first", "second"]
    assert names.check("/models/tiny") == "/models/tiny"
    for name, caller in (("tiny", NOBODY), ("/models/tiny", replace(NOBODY, models=("second",)))):
        with pytest.raises(ModelNotFound):
            names.check(name, caller)
