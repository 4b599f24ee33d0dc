"""The numbers among the flags of `pd-cluster serve`."""

from __future__ import annotations

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.settings.options import ServeOptions
from pd_cluster.settings.timeouts import Timeouts

GOOD = {
    "heartbeat_interval": 0.5,
    "dead_after": 1.0,
    "connect_timeout": 5.0,
    "credit_timeout": 10.0,
    "transfer_timeout": 30.0,
    "collective_timeout": 60.0,
    "step_timeout": 600.0,
    "request_timeout": 600.0,
    "drain_timeout": 30.0,
    "link_keepalive": 30.0,
    "guided_timeout": 5.0,
    "replay_wait": 30.0,
}


def timeouts(**changes: float) -> Timeouts:
    return ServeOptions(**{**GOOD, **changes}).timeouts()


def test_the_times_as_given() -> None:
    """Death is not declared after one missed heartbeat."""
    times = timeouts(request_timeout=0.0, drain_timeout=0.0)
    assert (times.heartbeat_interval_s, times.dead_after_s, times.request_timeout_s) == (0.5, 1.0, 0.0)
    with pytest.raises(ConfigError, match="at least two heartbeat intervals"):
        timeouts(heartbeat_interval=0.6)


@pytest.mark.parametrize("name", GOOD)
def test_times_that_make_no_sense(name: str) -> None:
    for value in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} "):
            timeouts(**{name: value})
    if name not in ("request_timeout", "drain_timeout", "replay_wait", "step_timeout"):
        with pytest.raises(ConfigError, match="must be above 0"):
            timeouts(**{name: 0.0})
