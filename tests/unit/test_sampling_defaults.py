"""Sampling defaults: their source, their overrides, and one-line refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.sampling_defaults import sampling_defaults
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.settings.sampling_override import KNOWN, parse_override

OWN = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": [2], "max_new_tokens": 50}


def checkpoint(own: dict[str, Any], folder: Path = Path("/models/x")) -> Checkpoint:
    return Checkpoint(folder, {}, own, "", folder)


def test_the_models_file_or_none_of_it() -> None:
    assert sampling_defaults(checkpoint(OWN), "auto", {}) == {"temperature": 0.6, "top_k": 20, "max_new_tokens": 50}
    assert sampling_defaults(checkpoint(OWN), "vllm", {}) == {}
    assert checkpoint(OWN).eos_token_ids == {2}


@pytest.mark.parametrize(("source", "rest"), [("auto", {"top_k": 20}), ("vllm", {}), ("/other", {"top_k": 20})])
def test_the_override_comes_last(source: str, rest: dict[str, int]) -> None:
    override = parse_override('{"temperature": 0.9, "min_p": 0.1, "max_new_tokens": null}')
    assert sampling_defaults(checkpoint(OWN), source, override) == {"temperature": 0.9, "min_p": 0.1, **rest}


def test_every_known_key_is_taken() -> None:
    text = '{"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.1, "max_new_tokens": 1}'
    assert list(parse_override(text)) == list(KNOWN)
    assert parse_override("") == parse_override("{}") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.7", ["'0.7'", "JSON object", '{"temperature": 0.7}']),
        ("\udcff", ["JSON object"]),
        ('{"temprature": 1}', ["'temprature'", "did you mean temperature?"]),
        ('{"num_beams": 4}', ["'num_beams'", "known are temperature, top_p"]),
        ('{"eos_token_id": 7}', ["'eos_token_id'", "stop_token_ids"]),
        ('{"temperature": -1}', ["temperature -1", "from 0 up"]),
        ('{"temperature": "hot"}', ["temperature 'hot'"]),
        ('{"temperature": true}', ["temperature True"]),
        ('{"top_p": 0}', ["top_p 0", "above 0"]),
        ('{"top_k": 1.5}', ["top_k 1.5", "integer"]),
        ('{"max_new_tokens": 0}', ["max_new_tokens 0", "from 1 up"]),
    ],
)
def test_a_wrong_override_is_one_line_that_names_flag_and_key(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    line = str(caught.value)
    assert line.startswith("--override-generation-config")
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_a_wrong_value_in_the_file_names_it_and_the_way_out() -> None:
    said = r"^/models/x/generation_config.json: top_p 7: .*or start with --generation-config vllm$"
    with pytest.raises(ModelError, match=said):
        sampling_defaults(checkpoint({"top_p": 7}), "auto", {})
    assert sampling_defaults(checkpoint({"top_p": 7}), "vllm", {}) == {}
