"""`pd-cluster check --network` on NPUs, with recorded output of hccn_tool (tests/data/npu) that a program replays."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from pd_cluster.cluster.preflight import hccn_checks
from pd_cluster.cluster.preflight.hccn_checks import Card
from pd_cluster.cluster.preflight.preflight_findings import Finding, in_order, is_wrong
from ranktable_tools import npu
from tests.support import npu_machine
from tests.support.npu_machine import answer, recorded

A2 = [Card("4", "192.0.2.24", "10.0.0.18", "prefill-0"), Card("5", "192.0.2.25", "10.0.0.18", "decode-0")]
FAR = Card("6", "198.51.100.26", "10.0.0.19", "decode-1")
A3 = Card("4", "203.0.113.14", "10.0.0.18", "prefill-0", is_in_super_pod=True)
A3_TWIN = replace(A3, device_id="5", address="203.0.113.15")
A3_OTHERS = [
    replace(A3, device_id="6", address="203.0.113.16", instance="decode-0"),
    replace(A3, device_id="6", address="203.0.113.36", host="10.0.0.19", instance="decode-1"),
]


def on(monkeypatch: pytest.MonkeyPatch, folder: Path, session: str) -> None:
    monkeypatch.setenv("PATH", str(npu_machine.install(folder, session, ("hccn_tool",))))


def script(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Replaces hccn_tool by a shell script."""
    tool = folder / "hccn_tool"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def examine(here: list[Card], far: list[Card], timeout_s: float = 60.0) -> list[Finding]:
    return in_order(hccn_checks.examine(here, far, lambda text: None, timeout_s))


def lines(findings: list[Finding], level: str) -> list[str]:
    return [each.line for each in findings if each.level == level]


def test_two_cards_of_an_a2_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One card has no detection address and loses packets. The worst finding comes first; equal findings are merged."""
    on(monkeypatch, tmp_path, recorded("a2_network"))
    found = examine(A2, [*A2, FAR])
    assert is_wrong(found)
    assert [each.level for each in found] == ["error", "warning", "warning", "ok", "ok", "ok", "ok", "ok"]
    (error,) = lines(found, "error")
    assert error.startswith("ping: NPU 5: NPU 6 of 10.0.0.19 (198.51.100.26) answers 0 of 3 packets; check address")
    health, ping = lines(found, "warning")
    assert health.startswith("health: NPU 5: reports Init: no address has been checked yet; set an address")
    assert ping.startswith("ping: NPU 5: NPU 4 of 10.0.0.18 (192.0.2.24) answers 2 of 3 packets; cards of one host")
    assert lines(found, "ok") == [
        "link: NPU 4, NPU 5: up",
        "health: NPU 4: the checked address answers",
        "address: NPU 4, NPU 5: as in the rank table",
        "ping: NPU 4: 2 cards answer",
        "TLS: NPU 4, NPU 5: off; the other hosts' cards must have the same setting",
    ]


def test_a_card_of_a_super_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Uses the vNIC and hccs_ping. Does not ping the other die of the same package, which would not answer."""
    on(monkeypatch, tmp_path, recorded("a3_network"))
    found = examine([A3], [A3, A3_TWIN, *A3_OTHERS])
    (error,) = lines(found, "error")
    assert error.startswith("ping: NPU 4: NPU 6 of 10.0.0.19 (203.0.113.36) answers 0 of 3 packets")
    assert [line.split(";")[0] for line in lines(found, "warning")] == [
        "link: NPU 4: the RoCE port is DOWN",
        "health: NPU 4: says Fault",
    ]
    assert not is_wrong(examine([A3], [A3, A3_TWIN, A3_OTHERS[0]]))


def test_a_down_port_and_a_fault_are_wrong_outside_a_super_pod() -> None:
    assert hccn_checks.judge_link(A2[0], answer("a3_network", "hccn_tool -i 4 -link -g")).level == "error"
    for state in ("Fault", "Socket fail", "Receive timeout", "Unreachable", "Time exceeded", "Thread error", "Unknown"):
        finding = hccn_checks.judge_health(A2[0], f"net health status: {state}\n")
        assert (finding.level, finding.text) == ("error", f"says {state}")


def test_cards_with_and_without_tls() -> None:
    """Reports a mix, because HCCL cannot connect a card with TLS to one without."""
    off = answer("a2_network", "hccn_tool -i 4 -tls -g")
    on = off.replace("switch[0]", "switch[1]")
    found = in_order(hccn_checks.judge_tls([(A2[0], off), (A2[1], on)]))
    assert [each.line.split(";")[0] for each in found] == [
        "TLS: NPU 4: is off, unlike other cards of this host",
        "TLS: NPU 5: is on, unlike other cards of this host",
    ]
    assert is_wrong(found)
    (same,) = in_order(hccn_checks.judge_tls([(A2[0], on), (A2[1], on)]))
    assert same.line == "TLS: NPU 4, NPU 5: on; the other hosts' cards must have the same setting"


def test_addresses_of_cards() -> None:
    text = answer("a2_network", "hccn_tool -i 5 -ip -g")
    assert hccn_checks.judge_address(A2[0], text).text == "is 192.0.2.25; device_ip is 192.0.2.24"
    assert "has no address ('no ip was preset')" in hccn_checks.judge_address(A2[0], "no ip was preset\n").line
    near, far = (replace(card, address=f"2001:db8::{card.device_id}") for card in (A2[0], FAR))
    assert near.address_query == ("-ip", "-inet6")
    assert near.ping(far) == ("-ping", "-inet6", "-g", "ipv6_address", "2001:db8::6")
    assert hccn_checks.judge_address(near, "ipaddr:2001:db8:0::4/64\n").level == "ok"


def test_refusals_of_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(monkeypatch, tmp_path, "echo 'permission denied: pls check this cmd run permission.'; exit 1")
    errors = lines(examine([A2[0]], []), "error")
    assert "link: NPU 4: hccn_tool was denied; run the check as root, such as with `docker exec -u root`" in errors
    script(monkeypatch, tmp_path, "echo 'Failure 7 of the driver.'; exit 1")
    errors = lines(examine([A2[0]], []), "error")
    assert any("hccn_tool says 'Failure 7 of the driver.'" in error for error in errors)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(npu, "_HCCN_TOOL", str(tmp_path / "no" / "hccn_tool"))
    (error,) = lines(examine(A2, A2), "error")
    assert error.startswith("hccn_tool: NPU 4, NPU 5: cannot be queried (")
    assert "mount /usr/local/Ascend/driver" in error


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(monkeypatch, tmp_path, "exec sleep 1000")
    errors = lines(examine([A2[0]], [FAR], timeout_s=0.2), "error")
    assert [line.split(":")[0] for line in errors] == ["link", "health", "address", "TLS", "ping"]
    assert all("did not end within 0.2 s" in line for line in errors)


def test_a_busy_program_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    busy = "echo 'hccn_tool is busy, please try again.'; exit 1"
    script(monkeypatch, tmp_path, f"rm {tmp_path}/busy 2>/dev/null && {{ {busy}; }}\necho 'link status: UP'")
    (tmp_path / "busy").touch()
    assert hccn_checks.ask(A2[0], ("-link", "-g"), 60.0) == "link status: UP\n"
    assert not (tmp_path / "busy").exists()
    script(monkeypatch, tmp_path, busy)  # never ends
    started_s = time.monotonic()
    assert hccn_checks.judge_link(A2[0], hccn_checks.ask(A2[0], ("-link", "-g"), 0.3)).level == "error"
    assert time.monotonic() - started_s < 30.0


def test_pings_that_take_too_long_together_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, tmp_path, recorded("a2_network"))
    monkeypatch.setattr(hccn_checks, "PINGS_S", -1.0)
    (line,) = lines(examine([A2[0]], [*A2, FAR]), "unchecked")
    assert line.startswith("ping: NPU 4: 2 cards were not pinged within -1 s, NPU 5 of 10.0.0.18 (192.0.2.25) the")


def test_what_a_product_does_not_answer_is_unchecked() -> None:
    found = hccn_checks.judge_ping(A2[0], FAR, "0 packets transmitted, 0 received, 0.00% packet loss")
    assert found.level == "error"
    for judge in (hccn_checks.judge_link, hccn_checks.judge_health):
        found = judge(A3, "This command is not supported on this product.\n")
        assert found.level == "unchecked"
        assert "not supported on this product" in found.line
        assert judge(A3, "Internal error 7\n").level == "error"
