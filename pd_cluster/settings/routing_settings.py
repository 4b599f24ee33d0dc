"""Settings of the scheduler: choosing instances, admitting clients, administration."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Annotated

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.setting import CHOICES, Form, Panel, Scope, Setting, at_least, check, finite, one_of, within

MAX_API_WORKERS = 64
MAX_SCHEDULERS = 64
MAX_TRACE_REQUESTS = 1_000_000
SCHEDULING_POLICIES = ("fcfs", "priority")
HOST_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")

SCHEDULER = partial(Setting, panel=Panel.SCHEDULER, scope=Scope.SERVER)
PROMISE = (finite("must be a number of seconds, or 0 for no objective"),)


def _is_priority(name: str, written: str) -> bool:
    known = one_of(SCHEDULING_POLICIES)
    if not known.accepts(written):
        raise ConfigError(f"{called(name)} {written!r}: {known.says}")
    return written == "priority"


def _auto_role(name: str, written: str) -> str:
    """Reads the value; the default method may also be written as "on", and none as "off"."""
    found = AUTO_ROLES.get(written.lower())
    if found is None:
        raise ConfigError(f"{called(name)} {written!r}: expected cost or rules")
    return found


AUTO_ROLES = {
    **dict.fromkeys(("", "off", "false", "no", "0"), ""),
    **dict.fromkeys(("cost", "on", "true", "yes", "1"), "cost"),
    "rules": "rules",
}
AUTO_ROLE = Form(str, _auto_role, lambda value: value, bare="cost")
FIRST_TOKENS = ("with-decode", "at-once")
PRIORITIES = Form(str, _is_priority, lambda has_priorities: SCHEDULING_POLICIES[has_priorities])


def _host_names(name: str, written: str) -> frozenset[str]:
    found = [each.strip().lower() for each in written.split(",") if each.strip()]
    for each in found:
        if not HOST_NAME.fullmatch(each):
            raise ConfigError(f"{called(name)} {each!r}: expected names without a port, such as pd.example,10.0.0.5")
    return frozenset(found)


HOST_NAMES = Form(str, _host_names, lambda names: ",".join(sorted(names)))


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the scheduler chooses instances, and its latency objectives; 0: no objective. The router defines the
    policies.
    """

    policy: Annotated[
        str,
        SCHEDULER(
            f"How workers are chosen for a request: {CHOICES}.",
            name="routing_policy",
        ),
    ] = "prefix-aware"
    has_priorities: Annotated[
        bool,
        SCHEDULER(
            "Order of waiting requests: fcfs, or priority (requests with lower numbers come first).",
            name="scheduling_policy",
            form=PRIORITIES,
        ),
    ] = False
    slo_ttft_s: Annotated[
        float,
        SCHEDULER(
            "Objective for seconds to the first token; requests that would miss it get a 429. 0: none.", checks=PROMISE
        ),
    ] = 0.0
    slo_tpot_s: Annotated[
        float,
        SCHEDULER(
            "Objective for seconds per further token; requests that would miss it get a 429. 0: none.", checks=PROMISE
        ),
    ] = 0.0
    # None: requests are not held back at the scheduler, but wait at an instance
    max_queue_s: Annotated[
        float | None,
        SCHEDULER(
            "Maximum seconds that a request waits for capacity before it gets a 429; 0: no limit.",
            name="max_queue_time",
            checks=(finite("must be a number of seconds, or 0 for no limit"),),
        ),
    ] = 60.0
    first_token: Annotated[
        str,
        SCHEDULER(
            "When a first token is sent. with-decode: it waits at most 0.1 s for the decode instance's step, for an "
            "even stream. at-once: it never waits.",
            checks=(one_of(FIRST_TOKENS),),
        ),
    ] = "with-decode"
    max_attempts: Annotated[
        int,
        SCHEDULER(
            "How many times a request may continue on other instances after a loss.",
            checks=(at_least(0, "must not be negative"),),
        ),
    ] = 6
    trace_requests: Annotated[
        int,
        SCHEDULER(
            "Number of recent requests (24 hours) that `pd-cluster trace --export` writes, as lengths and block "
            "hashes. 0: none.",
            checks=(within(0, MAX_TRACE_REQUESTS),),
        ),
    ] = 0

    def __post_init__(self) -> None:
        check(self)


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The processes at the public port, and whether instances change their roles."""

    api_workers: Annotated[
        int,
        SCHEDULER(
            "Number of processes that serve the public port.",
            checks=(within(1, MAX_API_WORKERS),),
            also=("api_server_count",),
        ),
    ] = 1
    uds: Annotated[
        str,
        SCHEDULER("Unix socket that replaces the public port.", after="api_workers"),
    ] = ""
    scheduler_lease: Annotated[
        str,
        SCHEDULER(
            "Record shared by several schedulers, one of which owns membership: a folder (0700), or "
            "kubernetes:NAMESPACE/NAME.",
            after="uds",
        ),
    ] = ""
    scheduler_index: Annotated[
        int,
        SCHEDULER(
            "With --scheduler-lease: this scheduler's number, unique among them.",
            checks=(within(0, MAX_SCHEDULERS - 1),),
            after="scheduler_lease",
        ),
    ] = 0
    auto_role: Annotated[
        str,
        SCHEDULER(
            "Change roles with the load: by cost (also without a value), or by rules with fixed thresholds.",
            form=AUTO_ROLE,
            after="scheduling_policy",
        ),
    ] = ""


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Limits of connections with requests at one port of one process. `per_host` counts those of one address; 0: no
    limit.

    In addition, `spare` connections may be open without a request, or with a probe's. `num_kept_descriptors`:
    descriptors reserved for instances, children and the admin port, including those that are open already.
    """

    total: Annotated[
        int,
        SCHEDULER(
            "Maximum number of connections with requests, over all API processes.",
            name="max_connections",
            also=("max_num_queued_reqs",),
            checks=(at_least(1),),
            after="api_workers",
        ),
    ] = 8192
    per_host: Annotated[
        int,
        SCHEDULER(
            "Maximum number of connections with requests from one address; 0: no such limit.",
            name="max_connections_per_host",
            checks=(at_least(0, "give 0 for no such limit"),),
            after="max_connections",
        ),
    ] = 6144
    spare: int = 64
    num_kept_descriptors: int = 40  # the admin port uses 24 of them

    def share(self, num_processes: int) -> ConnectionLimits:
        """Returns the limits for each of several processes that share one port."""
        per_host = max(1, self.per_host // num_processes) if self.per_host else 0
        return msgspec.structs.replace(self, total=max(1, self.total // num_processes), per_host=per_host)


ADMIN_CONNECTIONS = ConnectionLimits(total=16, per_host=0, spare=8, num_kept_descriptors=16)


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The admin port, and further host names that it accepts."""

    admin_port: Annotated[int | None, SCHEDULER("Admin port; default: port + 1.", checks=(within(1, 65535),))] = None
    admin_host: Annotated[str, SCHEDULER("Address to bind the admin port to.")] = "127.0.0.1"
    admin_hosts: Annotated[
        frozenset[str],
        SCHEDULER(
            "Further host names for the admin port and dashboards, separated by commas.",
            name="admin_allowed_hosts",
            form=HOST_NAMES,
        ),
    ] = frozenset()
    allow_runtime_lora: Annotated[
        bool,
        SCHEDULER(
            "Let the admin port load and unload LoRA adapters, from folders below --lora-root.", after="admin_host"
        ),
    ] = False
    lora_root: Annotated[
        str,
        SCHEDULER(
            "Folder below which the admin port may load adapters; the same on every host.", after="allow_runtime_lora"
        ),
    ] = ""

    weights_dir: Annotated[
        str,
        SCHEDULER("Folder below which the admin port may replace the weights.", after="lora_root"),
    ] = ""
    weight_update_hosts: Annotated[
        frozenset[str],
        SCHEDULER(
            "Addresses of trainers that may send weights, separated by commas.", form=HOST_NAMES, after="weights_dir"
        ),
    ] = frozenset()

    def __post_init__(self) -> None:
        check(self)
        if self.weight_update_hosts and not self.weights_dir:
            raise ConfigError(f"{called('weight_update_hosts')}: needs {called('weights_dir')}")
        if self.weights_dir and not os.path.isdir(self.weights_dir):
            raise ConfigError(f"{called('weights_dir')} {self.weights_dir}: no such folder")
        if self.allow_runtime_lora and not self.lora_root:
            raise ConfigError(f"{called('allow_runtime_lora')}: needs {called('lora_root')}")
        if self.lora_root and not self.allow_runtime_lora:
            raise ConfigError(f"{called('lora_root')}: needs {called('allow_runtime_lora')}")
        if self.lora_root and not os.path.isdir(self.lora_root):
            raise ConfigError(f"{called('lora_root')} {self.lora_root}: no such folder")
