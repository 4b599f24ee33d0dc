"""Checks the network of this host's NPUs with `hccn_tool`: link, health, TLS, address, and answers to pings.

The `judge_…` functions are pure; they read the tool's output, in the formats of its public source and command
reference. Queries cards in parallel, each with one call at a time, because the tool refuses some concurrent calls as
busy. Knows nothing of torch, and changes no setting of a card.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pd_cluster.cluster.preflight.preflight_findings import Finding, Level
from ranktable_tools.host_addresses import host_key
from ranktable_tools.npu import hccn_tool, parse_hccn_tool

CALL_S = 20.0  # hccn_tool's pings wait for three answers, each of which may take seconds
BUSY_AGAIN_S = 0.2  # no event reports that the tool is free again
PINGS_S = 300.0  # the time for all pings of one card
NUM_AT_ONCE = 8  # an Atlas A2 host has this many cards
BUSY, DENIED = "hccn_tool is busy", "permission denied"
UNPROVED = ("Init", "Detect ip set")  # states of -net_health without a result of the detection
_NOT_SUPPORTED = re.compile(r"not support", re.IGNORECASE)  # the query is not available
_PACKETS = re.compile(r"([0-9]+) packets transmitted, ([0-9]+) received")
_AS_ROOT = "run the check as root, such as with `docker exec -u root`"

Say = Callable[[str], None]  # a line of progress


@dataclass(frozen=True, slots=True)
class Card:
    """An NPU of the global rank table; `host` is its server_ip, `instance` the name of its instance."""

    device_id: str
    address: str
    host: str
    instance: str
    is_in_super_pod: bool = False

    @property
    def name(self) -> str:
        return f"NPU {self.device_id}"

    @property
    def far_name(self) -> str:
        return f"NPU {self.device_id} of {self.host} ({self.address})"

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.address

    @property
    def address_query(self) -> tuple[str, ...]:
        """Returns the query for the card's address. In a super pod, cards reach each other through their vNICs."""
        return ("-vnic",) if self.is_in_super_pod else ("-ip", "-inet6") if self.is_ipv6 else ("-ip",)

    def ping(self, to: Card) -> tuple[str, ...]:
        """Returns the arguments with which this card pings the other one."""
        if self.is_in_super_pod and to.is_in_super_pod:
            return ("-hccs_ping", "-g", "address", to.address)
        if to.is_ipv6:
            return ("-ping", "-inet6", "-g", "ipv6_address", to.address)
        return ("-ping", "-g", "address", to.address)

    def shares_package(self, other: Card) -> bool:
        """Whether both are dies of the same A3 card: such dies do not answer each other's pings."""
        same_host = host_key(self.host) == host_key(other.host)
        both = (int(self.device_id), int(other.device_id))
        return self.is_in_super_pod and same_host and both[0] // 2 == both[1] // 2


def judge_link(card: Card, text: str) -> Finding:
    """Judges `-link -g`: `link status: UP`."""
    status = _value(text, "link status")
    if status is None:
        return _unreadable("link", card, text)
    if status == "UP":
        return Finding("ok", "link", card.name, "up")
    if card.is_in_super_pod:
        return Finding("warning", "link", card.name, f"the RoCE port is {status}", "only needed outside the super pod")
    return Finding("error", "link", card.name, f"is {status}", "check its cable, optical module and switch port")


def judge_health(card: Card, text: str) -> Finding:
    """Judges `-net_health -g`: `net health status: Success`."""
    status = _value(text, "net health status")
    if status is None:
        return _unreadable("health", card, text)
    if status == "Success":
        return Finding("ok", "health", card.name, "the checked address answers")
    if status in UNPROVED:
        way_out = f"set an address to check with `hccn_tool -i {card.device_id} -netdetect -s address ADDRESS`"
        return Finding("warning", "health", card.name, f"reports {status}: no address has been checked yet", way_out)
    level: Level = "warning" if card.is_in_super_pod else "error"
    way_out = "check the gateway (`hccn_tool -i N -gateway -g`) and the address to check (`-netdetect -g`)"
    return Finding(level, "health", card.name, f"says {status}", way_out)


def parse_tls(text: str) -> bool | None:
    """Reads whether TLS is on, from `dev_id:0, tls switch[0](0:disable, 1:enable), …` of `-tls -g`; None if this is
    missing.
    """
    match = re.search(r"tls switch\[([01])\]", text)
    return match[1] == "1" if match else None


def judge_tls(answers: Sequence[tuple[Card, str]]) -> list[Finding]:
    """Judges `-tls -g` of all cards of a host: cards with TLS cannot connect to cards without."""
    found = [(card, parse_tls(text), text) for card, text in answers]
    findings = [_unreadable("TLS", card, text) for card, is_on, text in found if is_on is None]
    states = {is_on for _, is_on, _ in found if is_on is not None}
    for card, is_on, _ in found:
        if is_on is None:
            continue
        state = "on" if is_on else "off"
        if len(states) == 1:
            findings.append(
                Finding("ok", "TLS", card.name, f"{state}; the other hosts' cards must have the same setting")
            )
        else:
            way_out = "set all cards alike: `hccn_tool -i N -tls -s enable 0`, or 1"
            text = f"is {state}, unlike other cards of this host"
            findings.append(Finding("error", "TLS", card.name, text, way_out))
    return findings


def judge_address(card: Card, text: str) -> Finding:
    """Judges `-ip -g`, `-ip -inet6 -g` or `-vnic -g` against the rank table's device_ip."""
    address = parse_hccn_tool(text)
    if address is None:
        way_out = f"set it with `hccn_tool -i {card.device_id} -ip -s`, and restore /etc/hccn.conf"
        return Finding("error", "address", card.name, f"has no address ({_first(text)})", way_out)
    if host_key(address) != host_key(card.address):
        way_out = "write the table again with `pd-ranktable gen`"
        return Finding("error", "address", card.name, f"is {address}; device_ip is {card.address}", way_out)
    return Finding("ok", "address", card.name, "as in the rank table")


def judge_ping(card: Card, to: Card, text: str) -> Finding:
    """Judges `-ping` (`… 0.00% packet loss`) or `-hccs_ping` (`… 0.00% packets loss`) by the packets received."""
    match = _PACKETS.search(text)
    if match is None:
        return _unreadable("ping", card, text)
    sent, received = int(match[1]), int(match[2])
    if sent and sent == received:
        return Finding("ok", "ping", card.name, f"{to.far_name} answers")
    text = f"{to.far_name} answers {received} of {sent} packets"
    if host_key(card.host) == host_key(to.host):
        return Finding("warning", "ping", card.name, text, "cards of one host may also be linked without the network")
    return Finding("error", "ping", card.name, text, "check address, mask, VLAN and switch between the two")


def _value(text: str, key: str) -> str | None:
    match = re.search(rf"^\s*{key}\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return match[1] if match else None


def _unreadable(what: str, card: Card, text: str) -> Finding:
    if DENIED in text:
        return Finding("error", what, card.name, "hccn_tool was denied", _AS_ROOT)
    if _NOT_SUPPORTED.search(text):
        return Finding("unchecked", what, card.name, f"hccn_tool says {_first(text)}")
    return Finding("error", what, card.name, f"hccn_tool says {_first(text)}", "see `npu-smi info -t health -i N`")


def _first(text: str) -> str:
    return repr(next((line.strip()[:100] for line in text.splitlines() if line.strip()), "nothing"))


class ToolMissing(Exception):
    """hccn_tool cannot be started."""


class ToolTimeout(Exception):
    """hccn_tool did not answer in time."""


def ask(card: Card, arguments: Sequence[str], timeout_s: float = CALL_S) -> str:
    """Returns the tool's output and errors; retries while it is busy. Raises ToolMissing, ToolTimeout."""
    deadline_s = time.monotonic() + timeout_s
    command = [hccn_tool(), "-i", card.device_id, *arguments]
    while True:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=max(0.01, deadline_s - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ToolTimeout from None
        except OSError as error:
            raise ToolMissing(f"{command[0]}: {error.strerror}") from None
        if BUSY not in done.stdout or time.monotonic() + BUSY_AGAIN_S > deadline_s:
            return done.stdout
        time.sleep(BUSY_AGAIN_S)  # no event reports that the tool is free again


def examine(here: Sequence[Card], far: Sequence[Card], say: Say, timeout_s: float = CALL_S) -> list[Finding]:
    """Queries the cards of this host and makes them ping the `far` ones. Each call may take `timeout_s` seconds."""
    if not here:
        return []
    tls: list[tuple[Card, str]] = []

    def examine_card(card: Card) -> list[Finding]:
        say(f"asking {card.name}")
        found = [
            _judged(card, "link", ("-link", "-g"), judge_link, timeout_s),
            _judged(card, "health", ("-net_health", "-g"), judge_health, timeout_s),
            _judged(card, "address", (*card.address_query, "-g"), judge_address, timeout_s),
        ]
        try:
            tls.append((card, ask(card, ("-tls", "-g"), timeout_s)))
        except ToolTimeout:
            found.append(_too_long(card, "TLS", ("-tls", "-g"), timeout_s))
        return found + _pings(card, [to for to in far if to != card and not card.shares_package(to)], timeout_s)

    try:
        with ThreadPoolExecutor(min(NUM_AT_ONCE, len(here))) as pool:
            found = [finding for of_card in pool.map(examine_card, here) for finding in of_card]
    except ToolMissing as error:
        way_out = "mount /usr/local/Ascend/driver into the container, as docs/ascend.md describes"
        return [Finding("error", "hccn_tool", _names(here), f"cannot be queried ({error})", way_out)]
    tls.sort(key=lambda each: here.index(each[0]))
    return found + judge_tls(tls)


def _pings(card: Card, far: Sequence[Card], timeout_s: float) -> list[Finding]:
    """Pings one card after another; returns one finding if all answer, otherwise one for each that does not."""
    deadline_s = time.monotonic() + PINGS_S
    found: list[Finding] = []
    for number, to in enumerate(far):
        if time.monotonic() > deadline_s:
            text = f"{len(far) - number} cards were not pinged within {PINGS_S:g} s, {to.far_name} the first"
            return [
                *found,
                Finding(
                    "unchecked", "ping", card.name, text, "fix the cards that do not answer, and run the check again"
                ),
            ]
        try:
            finding = judge_ping(card, to, ask(card, card.ping(to), timeout_s))
        except ToolTimeout:
            finding = _too_long(card, "ping", card.ping(to), timeout_s)
        if finding.level != "ok":
            found.append(finding)
    return found or [Finding("ok", "ping", card.name, f"{len(far)} cards answer")] if far else []


def _judged(
    card: Card, what: str, arguments: Sequence[str], judge: Callable[[Card, str], Finding], timeout_s: float
) -> Finding:
    try:
        return judge(card, ask(card, arguments, timeout_s))
    except ToolTimeout:
        return _too_long(card, what, arguments, timeout_s)


def _too_long(card: Card, what: str, arguments: Sequence[str], timeout_s: float) -> Finding:
    text = f"`hccn_tool {' '.join(arguments)}` did not end within {timeout_s:g} s"
    return Finding("error", what, card.name, text, "see `npu-smi info -t health -i N`; the driver may be hanging")


def _names(cards: Iterable[Card]) -> str:
    return ", ".join(card.name for card in cards)
