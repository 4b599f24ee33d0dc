"""Holds the settings of a text service, and its view of the instances. Knows nothing of requests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from pd_cluster.cluster.routing.router import Router
from pd_cluster.settings.process_configs import ApiConfig


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The settings of one process's text service."""

    settings: ApiConfig
    max_model_len: int  # the process's own limit of a request's tokens
    seed: int | None = None  # seeds of requests that give none are derived from it; None: they are random
    sampling_defaults: Mapping[str, int | float] = field(default_factory=dict)  # see sampling_defaults.py
    adapters: Mapping[str, str] = field(default_factory=dict)  # current names of adapters -> digests
    # a secret that all processes serving the cluster share
    handle_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


class ServingInstances:
    """The instances that serve requests. `most`: the process's own limit of a request's tokens."""

    def __init__(self, router: Router, most: int) -> None:
        self._membership, self._most = router.membership, most

    def max_model_len(self) -> int:
        """Returns the smallest limit of this process and the ready workers; encoders have no limit."""
        ready = [i for i in self._membership.instances if i.is_ready and i.role != "encode"]
        infos = [i.info for i in ready if i.info is not None]
        return min([self._most, *(info.max_model_len for info in infos)])

    def addresses(self) -> set[str]:
        infos = (instance.info for instance in self._membership.instances)
        return {info.server_ip for info in infos if info is not None and info.server_ip}
