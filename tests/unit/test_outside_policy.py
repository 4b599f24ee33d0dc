"""--routing-policy module:function: an operator's policy from outside the package."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.placement.outside_policy import policy_of
from pd_cluster.cluster.placement.routing_policy import POLICIES
from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.service.serving_context import routing_rules
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.settings.timeouts import Timeouts
from tests.unit.test_routing_policy import ASK, NAMES, instance, link

MODULE = """
def last(instances, ask):
    prefills, decodes = ([each for each in instances if each.role == role] for role in ("prefill", "decode"))
    return prefills[-1], decodes[-1]

def failing(instances, ask):
    raise KeyError("no such thing")

def one(instances, ask):
    return instances[0]

def no_policy(only):
    return only

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policies.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def linked() -> list[Instance]:
    p0, p1, d0, d1 = (instance(name) for name in NAMES)
    link(p0, d0, d1)
    link(p1, d0, d1)
    return [p0, p1, d0, d1]


def test_the_flag_takes_it_up_to_the_router() -> None:
    routing = ServeOptions(routing_policy="own_policies:last").routing(POLICIES)
    choose = routing_rules(routing, Timeouts()).choose
    assert [each.name for each in choose(linked(), ASK)] == ["prefill-1", "decode-1"]
    assert policy_of("session") is POLICIES["session"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("nowhere:last", "ModuleNotFoundError: No module named 'nowhere'"),
        ("own_policies:first", "AttributeError"),
        ("own_policies:number", "TypeError"),
        ("own_policies:no_policy", "TypeError: too many positional arguments"),
        ("own_policies:", "expected one of least-loaded, .* or module:function"),
        (":last", "expected one of"),
    ],
)
def test_a_wrong_name_is_one_line(name: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=f"^--routing-policy {name}: .*{fault}") as caught:
        policy_of(name)
    assert len(str(caught.value).splitlines()) == 1


def test_its_faults_stay_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    """A policy's error fails only its request; the client gets no details, the log has them."""
    with caplog.at_level(logging.ERROR):
        for name in ("failing", "one"):
            with pytest.raises(Unavailable, match=r"^the routing policy has failed$"):
                policy_of(f"own_policies:{name}")(linked(), ASK)
        unlinked = [instance(name) for name in NAMES]
        resting = linked()
        resting[-1].state = "loading"
        for instances in (unlinked, resting):
            with pytest.raises(Unavailable, match=r"^the routing policy has chosen no usable pair$"):
                policy_of("own_policies:last")(instances, ASK)
    assert "no such thing" in caplog.text
    assert "chose prefill-1 and decode-1: they have no link" in caplog.text
    assert "chose prefill-1 and decode-1: decode-1 takes no requests" in caplog.text
