"""Numeric flags of `pd-cluster serve`."""

from __future__ import annotations

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.settings.timeouts import Timeouts

TIMES = ["heartbeat_interval", "dead_after", "connect_timeout", "credit_timeout", "transfer_timeout", "link_keepalive"]
TIMES += ["collective_timeout", "guided_timeout"]
OR_NOTHING = ["step_timeout", "request_timeout", "drain_timeout", "replay_wait"]


def timeouts(**changes: float) -> Timeouts:
    return ServeOptions(**{"heartbeat_interval": 0.5, "dead_after": 1.0, **changes}).timeouts()


def test_the_times_as_given() -> None:
    """Times are used as given, but the silence limit must allow more than one missed heartbeat."""
    times = timeouts(request_timeout=0.0, drain_timeout=0.0)
    assert (times.heartbeat_interval_s, times.dead_after_s, times.request_timeout_s) == (0.5, 1.0, 0.0)
    with pytest.raises(ConfigError, match="at least two heartbeat intervals"):
        timeouts(heartbeat_interval=0.6)


@pytest.mark.parametrize("name", TIMES + OR_NOTHING)
def test_times_that_make_no_sense(name: str) -> None:
    for value in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} "):
            timeouts(**{name: value})
    if name in TIMES:
        with pytest.raises(ConfigError, match="must be above 0"):
            timeouts(**{name: 0.0})
