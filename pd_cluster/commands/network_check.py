"""`pd-cluster check --network`: checks the network of this host before a start; shows the worst findings first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from pd_cluster.cluster.members.cluster_credentials import credentials_of
from pd_cluster.cluster.members.rank_table_place import Place, node_ports
from pd_cluster.cluster.preflight import hccn_checks
from pd_cluster.cluster.preflight.host_rendezvous import HostRendezvous
from pd_cluster.cluster.preflight.pair_probes import check_pairs, instances_of
from pd_cluster.cluster.preflight.preflight_findings import Finding, Level, in_order, is_wrong
from pd_cluster.cluster.preflight.rank_endpoint import ListedInstance
from pd_cluster.devices import hccl_environment
from pd_cluster.devices.device import check_name
from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.process_settings import KeyFiles
from pd_cluster.settings.setting import variable_of
from pd_cluster.transport.transport_table import CHOICES
from ranktable_tools.host_addresses import host_key

STYLES: dict[Level, str] = {"error": "bold red", "unchecked": "yellow", "warning": "yellow", "ok": "green"}


def run(place: Place, env: Mapping[str, str], console: Console, wait_s: float = 0.0, as_json: bool = False) -> bool:
    """Prints the findings; returns whether the network has no fault. Raises ConfigError for a wrong variable.

    `as_json`: prints one JSON object. `wait_s`: how long to wait for this command on other hosts; 0: links between
    hosts are not checked.
    """
    device, kv_transport = (env.get(variable_of(name)) or "auto" for name in ("device", "kv_transport"))
    check_name(device)
    if kv_transport not in CHOICES:
        known = ", ".join(CHOICES)
        raise ConfigError(f"{called('kv_transport')} {kv_transport}: expected one of {known}").named(variable_of)
    with _silence() if as_json else _progress(console) as say:
        meet = _meeting(place, env, wait_s)
        found = [*_of_cards(place, device, say), *check_pairs(place, device, kv_transport, say, meet)]
    found = in_order(found)
    if as_json:
        listed = [{"level": each.level, "text": each.line} for each in found]
        print(json.dumps({"findings": listed, "is_wrong": is_wrong(found)}, indent=2))
        return not is_wrong(found)
    for each in found:
        console.print(f"[{STYLES[each.level]}]{each.level:<9}[/] {escape(each.line)}", soft_wrap=True, highlight=False)
    counts = [sum(each.level == level for each in found) for level in STYLES]
    console.print(f"network: {', '.join(f'{n} {level}' for n, level in zip(counts, STYLES, strict=True))}")
    return not is_wrong(found)


def _meeting(place: Place, env: Mapping[str, str], wait_s: float) -> HostRendezvous | None:
    """Returns the rendezvous with other hosts; None without a wait. Raises ConfigError without NODE_PORTS or secret."""
    if not wait_s or not place.spans_hosts:
        return None
    ports = dict(zip(place.names, node_ports(env, place), strict=True))
    return HostRendezvous(credentials_of(place, KeyFiles()).secret, ports, wait_s)


def _of_cards(place: Place, device: str, say: Callable[[str], None]) -> list[Finding]:
    """Queries hccn_tool about the NPUs of this host that are in the table."""
    everyone = [each for each in instances_of(place) if hccl_environment.is_wanted(device, each.server)]
    cards = [card for instance in everyone for card in _cards(instance)]
    own = host_key(place.server.server_ip)
    return hccn_checks.examine([card for card in cards if host_key(card.host) == own], cards, say)


def _cards(instance: ListedInstance) -> list[hccn_checks.Card]:
    return [
        hccn_checks.Card(
            each.device_id,
            each.device_ip,
            instance.server.server_ip,
            instance.name,
            is_in_super_pod=each.super_device_id is not None,
        )
        for each in instance.server.device
    ]


@contextmanager
def _silence() -> Iterator[Callable[[str], None]]:
    yield lambda text: None


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current step: in place on a terminal, otherwise as a separate line."""
    if not console.is_terminal:
        yield lambda text: console.print(f"{text} …", markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("checking the network") as status:
        yield lambda text: status.update(escape(f"{text} …"))
