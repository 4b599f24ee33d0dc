"""Overrides of config.json, positions read from it, and the comparison of numerics."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.errors import ModelError, called
from pd_cluster.numerics import KEY_ORDER, Numerics, RopeScaling, canonical, overridden

LINEAR = {"rope_type": "linear", "factor": 4.0}
OLD = {"max_position_embeddings": 64, "rope_theta": 7.0, "rope_scaling": LINEAR}
NEW = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 7.0, **LINEAR}}
KINDS = {"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0}}}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_positions_are_overridden_by_either_name_in_either_form(name: str, spelling: str) -> None:
    given = {name: {spelling: "dynamic", "factor": 2.0}}
    assert overridden(OLD, given) == {**OLD, "rope_scaling": DYNAMIC}
    assert overridden(NEW, given)["rope_parameters"] == {"rope_theta": 7.0, **DYNAMIC}
    for config in (OLD, NEW, {"max_position_embeddings": 64}):
        assert RopeScaling.of(overridden(config, given)).kind == "dynamic"


def test_a_base_goes_where_the_config_has_it_and_stays_where_none_is_given() -> None:
    assert overridden(OLD, {"rope_theta": 9}) == {**OLD, "rope_theta": 9}
    assert overridden(NEW, {"rope_theta": 9})["rope_parameters"] == {"rope_theta": 9, **LINEAR}
    assert overridden({}, {"rope_theta": 9}) == {"rope_theta": 9, "rope_scaling": None}
    for name in ("rope_scaling", "rope_parameters"):
        assert overridden(OLD, {name: None}) == {**OLD, "rope_scaling": None}
        assert overridden(NEW, {name: None})["rope_parameters"] == {"rope_theta": 7.0, "rope_type": "default"}


def test_without_a_factor_the_base_follows_the_length_alone() -> None:
    given = {"rope_scaling": {"rope_type": "dynamic"}}
    assert overridden({}, given)["rope_scaling"] == {"rope_type": "dynamic", "factor": 1.0}
    assert overridden(OLD, given)["rope_scaling"]["factor"] == 4.0


@pytest.mark.parametrize("overrides", [{"rope_theta": 9}, {"rope_scaling": LINEAR}, {"rope_parameters": LINEAR}])
def test_what_would_change_nothing_is_refused(overrides: dict[str, Any]) -> None:
    """In this model each kind of layer has its own rope parameters, so an override without effect is refused."""
    with pytest.raises(
        ModelError, match=r"for each kind of layer; give .* with KIND one of full_attention, sliding_attention"
    ):
        overridden(KINDS, overrides)
    one = {"rope_parameters": {"full_attention": {"rope_theta": 9}}}
    assert overridden(KINDS, one)["rope_parameters"]["full_attention"] == {"rope_theta": 9}
    assert overridden(KINDS, one)["rope_parameters"]["sliding_attention"] == {"rope_theta": 3.0}


@pytest.mark.parametrize("value", ["x", 5, [1]])
def test_values_of_another_kind_are_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=r"rope_scaling .*expected an object"):
        overridden(OLD, {"rope_scaling": value})


def test_longrope_of_one_kind_of_layers_is_refused() -> None:
    """Such a config is refused, because a step's longest request would change the frequencies of all."""
    with pytest.raises(ModelError, match=r"rope_parameters\.full_attention: longrope for only one kind"):
        RopeScaling.of({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {}}})


def test_the_outer_of_two_original_lengths_counts() -> None:
    """As in transformers, the outer of two original lengths counts."""
    name = "original_max_position_embeddings"
    config = {"max_position_embeddings": 64, name: 32, "rope_scaling": {"rope_type": "longrope", name: 8}}
    assert RopeScaling.of(config) == RopeScaling(kind="longrope", reach=32, most=64)


def test_numerics_differ_by_the_name_of_a_flag() -> None:
    ours = Numerics(hf_overrides=canonical({"rope_theta": 9}))
    assert ours.difference(Numerics(hf_overrides=canonical({"rope_theta": 9.0}))) is None
    assert ours.difference(Numerics()) == (called("hf_overrides"), '{"rope_theta":9}', "{}")
    assert Numerics(dtype="bfloat16").difference(Numerics()) == (called("dtype"), "bfloat16", "float32")
    other = Numerics(attention_backend="sdpa")
    assert other.difference(Numerics()) == (called("attention_backend"), "sdpa", "auto")
    assert Numerics(device="cuda", attention_backend="Triton").difference(other) is None, "devices differ in kind"
    ordered, fixed = Numerics(key_order="halves"), Numerics(deterministic=True)
    assert ordered.difference(Numerics()) == (KEY_ORDER, "halves", "model")
    assert fixed.difference(Numerics()) == (called("deterministic"), "on", "off")
    found = Numerics(device="cuda", attention_backend="Triton").difference(fixed)
    assert found == (called("deterministic"), "off", "on")
    assert len({each.digest for each in (ours, other, ordered, fixed, Numerics())}) == 5
