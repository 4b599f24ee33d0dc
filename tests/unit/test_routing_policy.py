"""The choice of the pair of instances that serves a request."""

from __future__ import annotations

import msgspec
import pytest

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import Prompt
from pd_cluster.cluster.placement import routing_policy as routing
from pd_cluster.cluster.placement.routing_policy import RoutingRequest, least_loaded
from pd_cluster.errors import Unavailable
from pd_cluster.process_messages import InstanceState
from pd_cluster.types import LinkState, RequestSpec, Role, Sampling
from pd_cluster.types.variants import short_name
from pd_cluster.wire import Load

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ASK = RoutingRequest(Prompt(RequestSpec([1, 2, 3], Sampling())))


def instance(name: str, state: InstanceState = "ready", tokens: int = 0, reason: str = "") -> Instance:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    return Instance(name, role, "127.0.0.1", 1, ["0"], state=state, reason=reason, outstanding_tokens=tokens)


def link(prefill: Instance, *decodes: Instance, state: str = "up (shm)") -> None:
    prefill.load = Load(links={**prefill.load.links, **{decode.key: LinkState.parse(state) for decode in decodes}})


def chosen(*instances: Instance) -> str:
    prefill, decode = least_loaded(instances, ASK)
    return f"{prefill.name} {decode.name}"


def why_not(*instances: Instance) -> str:
    with pytest.raises(Unavailable) as caught:
        least_loaded(instances, ASK)
    assert "\n" not in str(caught.value)
    assert caught.value.retry_after_s >= 1
    return str(caught.value)


def test_only_ready_instances_serve() -> None:
    states: list[InstanceState] = ["unreachable", "loading", "connecting", "failed"]
    for state in states:
        p0, d0, d1 = instance("prefill-0"), instance("decode-0", state), instance("decode-1", tokens=99)
        link(p0, d0, d1)
        assert chosen(p0, d0, d1) == "prefill-0 decode-1"
        assert chosen(p0, d0) == "prefill-0 prefill-0"
        p0.state = state
        assert why_not(p0, d0).startswith("no prefill and no decode instance is ready: ")
    p0.reason = "it serves another model"
    assert why_not(p0, d0).endswith("prefill-0 is failed (it serves another model); decode-0 is failed")
    assert why_not() == "there is no prefill and no decode instance"
    assert chosen(instance("decode-0")) == "decode-0 decode-0"


@pytest.mark.parametrize("policy", ["least-loaded", "prefix-aware", "predicted-ttft"])
def test_an_adapter_in_memory_attracts_its_requests(policy: str) -> None:
    """An instance with the adapter is preferred until its queue outweighs reading the adapter again elsewhere."""
    p0, p1, d0, d1 = (instance(name) for name in NAMES)
    for prefill in (p0, p1):
        link(prefill, d0, d1)
    adapter, other = "ab" * 32, "cd" * 32
    for each, present in ((p0, other), (p1, adapter), (d0, adapter), (d1, other)):
        each.load = msgspec.structs.replace(each.load, adapters=(short_name(present),))

    def chosen_for(digest: str) -> str:
        prompt = Prompt(
            RequestSpec([1] * (routing.MAX_LOCAL_TOKENS + 1), Sampling())
        )  # one decode instance lacks the adapter
        ask = RoutingRequest(prompt, adapter=digest)
        return " ".join(each.name for each in routing.POLICIES[policy]((p0, p1, d0, d1), ask))

    assert chosen_for("") == "prefill-0 decode-0"
    assert chosen_for(adapter) == "prefill-1 decode-0"
    assert chosen_for(other) == "prefill-0 decode-1"
    for each in (p1, d0):
        each.outstanding_tokens = routing.ADAPTER_TOKENS - 1
    assert chosen_for(adapter) == "prefill-1 decode-0"
    for each in (p1, d0):
        each.outstanding_tokens = routing.ADAPTER_TOKENS + 1
    assert chosen_for(adapter) == "prefill-0 decode-1"
    for each in (p0, p1, d0, d1):  # without memory limits all have it
        each.load = msgspec.structs.replace(each.load, adapters=None)
    assert chosen_for(adapter) == "prefill-0 decode-1"


def test_what_an_instance_was_before_does_not_count() -> None:
    """A new scheduler knows only the current state, and must choose like its predecessor."""
    p0, d0, d1 = instance("prefill-0"), instance("decode-0"), instance("decode-1", tokens=9)
    encoder = Instance("encode-0", "encode", "127.0.0.1", 1, ["0"], state="ready")
    link(p0, d0, d1, state="refused: dtype float32 and bfloat16")
    assert chosen(p0, d0, d1, encoder) == "decode-0 decode-0"
    assert routing.why_unavailable((p0, d0)).endswith("prefill-0 to decode-0: refused: dtype float32 and bfloat16")
    assert routing.is_served((p0,))
    assert not routing.is_served((encoder,))
    assert why_not(encoder) == "there is no prefill and no decode instance"
    link(p0, d1)
    assert routing.single_instance((p0, d0, d1))[0] is d1, "a reachable one must come first"


def test_the_first_pair_is_awaited_for_a_moment() -> None:
    """With one instance ready, requests wait a limited time for a starting instance or link, but not for dead ones."""
    p0, d0 = instance("prefill-0", "loading"), instance("decode-0")
    d0.ready_s = 100.0
    assert routing.awaits_pair((p0, d0), 103.0, 3.5)
    assert not routing.awaits_pair((p0, d0), 103.5, 3.5), "an instance may load for an hour, or die repeatedly"
    p0.state, p0.reason = "unreachable", ""
    assert routing.awaits_pair((p0, d0), 103.0, 3.5), "it has not been contacted yet"
    p0.reason = "nobody answers"
    assert not routing.awaits_pair((p0, d0), 100.0, 3.5)
    p0.state, p0.reason, p0.ready_s = "ready", "", 101.0
    assert routing.awaits_pair((p0, d0), 103.0, 3.5)
    link(p0, d0, state="refused: x")
    assert not routing.awaits_pair((p0, d0), 103.0, 3.5)
    link(p0, d0)
    assert not routing.awaits_pair((p0, d0), 103.0, 3.5)
    assert not routing.awaits_pair((), 0.0, 3.5)


def test_links_to_the_dead_are_not_reported() -> None:
    p0, d0, d1 = instance("prefill-0"), instance("decode-0", "unreachable"), instance("decode-1")
    link(p0, d0, d1, state="opening")
    assert routing.refused_links([p0, d0, d1]) == ["prefill-0 to decode-1: opening"]


def test_a_link_at_rest_is_opened_only_for_a_considerable_gain() -> None:
    p0, d0, d1 = (instance(name) for name in ("prefill-0", "decode-0", "decode-1"))
    link(p0, d0, state="up (hccl)")
    link(p0, d1, state="resting")
    d0.outstanding_tokens = routing.WAKE_SLACK_TOKENS - 1
    assert chosen(p0, d0, d1) == "prefill-0 decode-0"
    d0.outstanding_tokens = routing.WAKE_SLACK_TOKENS
    assert chosen(p0, d0, d1) == "prefill-0 decode-1"
    link(p0, d0, state="resting")
    d0.outstanding_tokens, d1.outstanding_tokens = 0, 1
    assert chosen(p0, d0, d1) == "prefill-0 decode-0", "among resting links the load must decide"
