"""Settings of `--kv-events-config`: vLLM's names (vllm/config/kv_events.py, 0.32), as one JSON object."""

from __future__ import annotations

import difflib
import json
import re
from typing import Annotated, Any, Literal

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.setting import Form
from ranktable_tools.host_addresses import is_ip, is_loopback

Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
TCP = re.compile(r"tcp://(\*|\[[^]]+\]|[^:\[\]]+):(\d{1,5})")


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an instance publishes events of its prefix cache. This process binds every endpoint.

    `buffer_steps`: batches kept for replay. `hwm`: batches queued for one subscriber. `max_queue_size`: batches that
    wait to be published.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    topic: Annotated[str, msgspec.Meta(max_length=256)] = ""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.endpoint, *([self.replay_endpoint] if self.replay_endpoint else []))

    def of_instance(self, number: int) -> KVEventsConfig:
        """Returns the settings of one of a host's instances; as in vLLM, its number is added to ports and paths."""
        moved = [_moved(each, number) for each in self.endpoints]
        return msgspec.structs.replace(self, endpoint=moved[0], replay_endpoint=moved[1] if moved[1:] else None)


def is_private(endpoint: str) -> bool:
    """Returns whether no other host can reach this endpoint."""
    found = TCP.fullmatch(endpoint)
    return endpoint.startswith("ipc://") if found is None else is_loopback(found[1].strip("[]"))


def check_private(config: KVEventsConfig, has_curve: bool) -> None:
    """Raises ConfigError for an endpoint that strangers could read: events contain the tokens of prompts."""
    for endpoint in config.endpoints if not has_curve else ():
        if not is_private(endpoint):
            raise ConfigError(
                f"{called('kv_events_config')}: endpoint {endpoint!r} can be reached from other hosts, and events "
                "contain the tokens of prompts: give tcp://127.0.0.1:PORT or ipc://PATH, or "
                f"{called('node_key_file')} and {called('trusted_nodes')}, with which subscribers prove their "
                "identity (CURVE)"
            )


def _moved(endpoint: str, number: int) -> str:
    found = TCP.fullmatch(endpoint)
    if not number:
        return endpoint
    return f"{endpoint}_{number}" if found is None else f"tcp://{found[1]}:{int(found[2]) + number}"


def _read(name: str, written: str) -> KVEventsConfig | None:
    if not written:
        return None
    try:
        given: Any = json.loads(written)
    except ValueError as error:
        raise ConfigError(f"{called(name)} {written[:80]!r}: is not JSON ({error})") from None
    known = KVEventsConfig.__struct_fields__
    if not isinstance(given, dict):
        raise ConfigError(f"{called(name)} {written[:80]!r}: expected an object with {', '.join(known)}")
    for field in given:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            raise ConfigError(
                f"{called(name)}: {field[:80]!r}: unknown field; "
                + (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")
            )
    try:
        found = msgspec.convert(given, KVEventsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{called(name)}: {error}") from None
    for field, text in (("topic", found.topic), *(("endpoint", each) for each in found.endpoints)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{called(name)}: {field} {ascii(text)[:80]}: contains half of a surrogate pair"
            ) from None
    for endpoint in found.endpoints:
        _check_endpoint(name, endpoint)
    if len({*found.endpoints}) < len(found.endpoints):
        raise ConfigError(f"{called(name)}: endpoint and replay_endpoint are the same; give another port")
    return found


def _check_endpoint(name: str, endpoint: str) -> None:
    found = TCP.fullmatch(endpoint)
    host = found[1].strip("[]") if found is not None else ""
    is_host = host in ("*", "0.0.0.0", "::", "localhost") or is_ip(host)
    is_tcp = found is not None and 0 < int(found[2]) < 65536 and is_host
    if not is_tcp and not (endpoint.startswith("ipc://") and len(endpoint) > len("ipc://")):
        raise ConfigError(
            f"{called(name)}: endpoint {endpoint[:80]!r}: expected tcp://ADDRESS:PORT with an address of this host, or "
            f"ipc://PATH; subscribers connect, this process binds"
        )


EVENTS = Form(
    str,
    _read,
    lambda config: msgspec.json.encode(config).decode() if config is not None else "",
    takes_mappings=True,
)
