"""Checks the flags of a whole cluster before any of its processes starts, so that an error appears only once."""

from __future__ import annotations

from collections.abc import Mapping

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.placement.outside_policy import policy_of
from pd_cluster.cluster.placement.routing_policy import POLICIES
from pd_cluster.devices.device import check_name
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.text.template_source import with_source
from pd_cluster.transport.transport_table import CHOICES


def check_launch(options: ServeOptions, env: Mapping[str, str]) -> None:
    """Checks the values that all instances on this host will get, and the files that they name. Raises ConfigError."""
    options.check()
    policy_of(options.routing(POLICIES).policy)
    options.handover(CHOICES)
    options.http(env)
    with_source(options.chat())
    engine = options.engine()
    check_name(engine.device)
    Checkpoint.of(engine).max_model_len(engine.max_model_len)
