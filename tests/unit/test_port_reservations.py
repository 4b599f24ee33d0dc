"""Ports chosen for servers: free, and reserved."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pd_cluster.cluster.processes import port_reservations
from pd_cluster.errors import ConfigError
from tests.support.held import held, more_than

FEW = range(64_000, 64_040)  # above the ports of other tests' servers and outgoing connections
OTHERS = """
from pd_cluster.cluster.processes import port_reservations
port_reservations.candidate_ports = lambda: iter(range({start}, {stop}))
print(port_reservations.free_ports({count}), flush=True)
input()
"""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_reservations, "candidate_ports", lambda: iter(FEW))
    monkeypatch.setattr(port_reservations, "FOR_LIFE", port_reservations.Reservations())  # released with the test


def test_what_another_process_has_chosen_is_not_chosen(few: None) -> None:
    script = OTHERS.format(start=FEW.start, stop=FEW.stop, count=20)
    other = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True)
    with other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().strip("[]\n").split(",")))
        assert len(theirs) == 20
        ours = port_reservations.free_ports(10)
        assert not theirs & set(ours)
        with pytest.raises(ConfigError, match="no 11 free ports"):
            port_reservations.free_ports(11)
        other.communicate("")
    assert set(port_reservations.free_ports(5)) <= theirs  # the process has ended


def test_a_port_is_free_again_when_its_reservation_ends(few: None) -> None:
    reservations = port_reservations.Reservations()
    before = held()
    first = port_reservations.free_ports(len(FEW), reservations)
    with pytest.raises(ConfigError, match="no 1 free ports"):
        port_reservations.free_ports(1)
    reservations.close()
    reservations.close()
    assert more_than(before) == Counter()
    assert set(port_reservations.free_ports(len(FEW))) == set(first)


def test_a_pair_is_two_neighbours(few: None) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", FEW[1]))
        server.listen()
        port = port_reservations.free_port_pair()
        assert port >= FEW[2], "a port in use must not be chosen"
        assert FEW[1] not in port_reservations.free_ports(3)
        assert {port, port + 1}.isdisjoint(port_reservations.free_ports(10))


def test_they_lie_below_those_of_outgoing_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_reservations, "OUTGOING", tmp_path / "range")
    for outgoing, stop in ((None, 65_536), ("32768\t60999\n", 32_768), ("1024\t65535\n", 65_536), ("?", 65_536)):
        if outgoing is not None:
            (tmp_path / "range").write_text(outgoing)
        found = list(port_reservations.candidate_ports())
        assert (min(found), max(found)) == (10_000, stop - 1)
