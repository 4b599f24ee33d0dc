"""Forged or replayed proofs of node keys are worthless, and temporarily unreadable files change nothing."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_cluster import wire
from pd_cluster.errors import ConfigError
from pd_cluster.extras.node_keys import node_key_files
from pd_cluster.extras.node_keys import node_proofs as nodes_module
from pd_cluster.extras.node_keys.node_key_files import (
    Node,
    NodeKeys,
    PublicPart,
    Revoked,
    TrustedNodes,
    new_keys,
    now_text,
    read_node_keys,
    read_public_part,
    read_trusted_nodes,
    revoking,
    stamp_of,
    trusting,
    write_node_keys,
    write_public,
)
from pd_cluster.extras.node_keys.node_proofs import Nodes, check_own
from pd_cluster.net import connection_handshake
from pd_cluster.net.connection_handshake import MOST_LINES, PERIOD_S, Handshake, LocalIdentity
from pd_cluster.net.peer_admission import Admission, JoinAdmission, join_key
from pd_cluster.net.zmq_sockets import KeyPair
from pd_cluster.settings.process_configs import Credentials
from tests.support.mail import SCHEDULER, SECRET
from tests.unit.test_node_keys import command

PEER, OWN = "decode-0@7", "scheduler@1"


class Pair:
    """A worker of node a with `keys`, and a scheduler whose trusted list is the file."""

    def __init__(self, folder: Path) -> None:
        self.file, self.key_file, self.line = folder / "trusted.nodes", folder / "a.key", KeyPair.of(b"")
        self.keys = new_keys("a")
        self.trust(self.keys.public[0])
        write_node_keys(self.key_file, self.keys)
        own = Credentials(SECRET, node_key_file=str(self.key_file), trusted_nodes=str(self.file))
        self.own = Nodes(own, OWN, SCHEDULER.private, SCHEDULER.public)

    def trust(self, *public: bytes) -> None:
        known = read_trusted_nodes(self.file) if self.file.exists() else TrustedNodes()
        node = Node("a", [PublicPart(each.hex()) for each in public])
        write_public(self.file, trusting(known, node, self.file))

    def revoke(self, key: str = "") -> None:
        write_public(self.file, revoking(read_trusted_nodes(self.file), "a", key, self.file, now_text()))

    def proofs(self, *private: bytes) -> tuple[wire.NodeProof, ...]:
        shown = self.file.parent / "shown.key"
        write_node_keys(shown, NodeKeys("a", private or self.keys.private))
        worker = Nodes(Credentials(SECRET, node_key_file=str(shown)), PEER, self.line.private, self.line.public)
        return worker.proofs_to(OWN, SCHEDULER.public, "client")[1]

    def believe(self, *private: bytes, node: str = "a") -> tuple[bytes, ...]:
        """Returns the keys that the scheduler accepts as the peer's."""
        return self.own.believe(node, self.proofs(*private), PEER, self.line.public, "client").keys


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


# ---- proofs


@pytest.mark.parametrize("is_first", [True, False])
def test_a_stolen_key_beside_the_thief_s_own_is_cut_off_with_its_revocation(pair: Pair, is_first: bool) -> None:
    stolen, own = pair.keys.private[0], b"t" * 32
    shown = (own, stolen) if is_first else (stolen, own)
    keys = pair.believe(*shown)
    assert keys == pair.keys.public, "an unlisted key must not count"
    assert pair.own.problem("a", keys) == ""
    pair.trust(new_keys("a").public[0])  # the node continues with another key
    pair.revoke(pair.keys.public[0].hex())
    pair.own.read_again()
    assert " of node a was revoked at " in pair.own.problem("a", keys)
    with pytest.raises(ConfigError, match="node a has another key"):
        pair.believe(*shown)


@pytest.mark.parametrize("under", ["a", "before"])
def test_a_key_that_the_list_names_and_revokes_counts_nowhere(pair: Pair, under: str) -> None:
    """A revoked key stays invalid even if an operator lists it again, also under another name."""
    named, unknown = pair.keys.public[0], b"t" * 32
    part, over = PublicPart(named.hex()), PublicPart(new_keys("a").public[0].hex(), "2026-01-01")
    assert pair.own.trusts_key(named)
    for keys in ([part], [part, over], [over, part]):
        revoked = [Revoked(under, named.hex(), "2026-01-02")]
        write_public(pair.file, TrustedNodes(1, [Node("a", keys)], revoked))
        pair.own.read_again()
        assert not pair.own.trusts_key(named)
        for shown in (pair.keys.private, (unknown, *pair.keys.private)):
            with pytest.raises(ConfigError, match="was revoked at"):
                pair.believe(*shown)
        assert "was revoked at" in pair.own.problem("a", [over.key]), "none of the node's keys may count"
        with pytest.raises(ConfigError, match="was revoked at"):
            check_own(pair.keys, pair.key_file, read_trusted_nodes(pair.file), pair.file, time.time())
    stays = new_keys("a")
    write_public(pair.file, TrustedNodes(1, [Node("a", [part, PublicPart(stays.public[0].hex())])], revoked))
    pair.own.read_again()
    assert pair.believe(*stays.private, *pair.keys.private) == stays.public
    with pytest.raises(ConfigError, match="has another key"):
        pair.believe(unknown, *pair.keys.private)


def test_a_key_whose_time_is_over_counts_no_more(pair: Pair) -> None:
    keys = pair.believe()
    write_public(pair.file, TrustedNodes(1, [Node("a", [PublicPart(keys[0].hex(), "2026-01-01T00:00:00Z")])]))
    pair.own.read_again()
    assert " of node a expired at 2026-01-01T00:00:00Z" in pair.own.problem("a", keys)
    with pytest.raises(ConfigError, match="expired at"):
        pair.believe()


def test_while_a_node_is_rotated_the_keys_count_that_the_list_has(pair: Pair) -> None:
    both = new_keys("a", pair.keys)
    assert pair.believe(*both.private) == both.public[1:]
    pair.trust(both.public[0])
    pair.own.read_again()
    assert pair.believe(*both.private) == both.public
    write_public(pair.file, TrustedNodes(1, [Node("a", [PublicPart(both.public[0].hex())])]))
    pair.own.read_again()
    assert pair.believe(*both.private) == both.public[:1]
    assert pair.own.problem("a", both.public[1:]) == "", "a retired key must not close connections"


def test_no_secret_is_computed_with_keys_that_the_list_lacks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [pair.proofs(b"t" * 32), pair.proofs()]
    asked: list[bytes] = []
    monkeypatch.setattr(nodes_module, "shared_secret", lambda private, public: asked.append(public) or bytes(32))
    for node, proofs, told in (("a", shown[0], "has another key"), ("b", shown[1], "is not trusted")):
        with pytest.raises(ConfigError, match=told):
            pair.own.believe(node, proofs, PEER, pair.line.public, "client")
    pair.revoke()
    pair.own.read_again()
    with pytest.raises(ConfigError, match="was revoked at"):
        pair.own.believe("a", shown[1], PEER, pair.line.public, "client")
    assert not asked
    pair.file.unlink()
    pair.trust(pair.keys.public[0])
    pair.own.read_again()
    with pytest.raises(ConfigError, match="does not have its key"):
        pair.own.believe("a", (*shown[0], *shown[1]), PEER, pair.line.public, "client")
    assert asked == [pair.keys.public[0]]


def test_peers_that_come_again_and_again_do_not_fill_the_log(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    credentials = Credentials(SECRET, (SCHEDULER.public,), SCHEDULER.private)
    admission = JoinAdmission(credentials, OWN, SCHEDULER.public)
    key = KeyPair.of(join_key(SECRET)).public
    told: list[str] = []
    connections = cast(Any, SimpleNamespace(send_gone=lambda identity, envelope, reason: told.append(reason)))
    listens = Handshake(
        connections,
        LocalIdentity("scheduler", SCHEDULER, cast(Admission, admission), pair.own),
        bytes,
        1.0,
        lambda: now_s[0],
    )

    def come(name: str) -> None:
        envelope = wire.Envelope(name, 1, 1, cast(Any, None))
        assert listens.accept(b"i", key, envelope, wire.Hello(kind="worker", node="x\ny", node_proofs=proofs)) is None

    proofs = pair.proofs()
    with caplog.at_level(logging.ERROR, logger=connection_handshake.__name__):
        for number in range(3 * MOST_LINES):
            come(f"d{number}\nforged: all is well")
        assert len(caplog.records) == MOST_LINES
        now_s[0] = PERIOD_S + 1.0
        come("x" * 10_000)
    lines = [each.getMessage() for each in caplog.records[MOST_LINES - 1 :]]
    assert lines[1] == f"{2 * MOST_LINES} more peers were not accepted"
    assert lines[0].startswith(f"not accepted: 'd{MOST_LINES - 1}\\nforged")
    assert r"node 'x\ny' is not trusted" in lines[0]
    assert len(caplog.records) == MOST_LINES + 2
    assert all("\n" not in each and len(each) < 1000 for each in lines)
    assert len(told) == 3 * MOST_LINES + 1, "each peer must get the reason"


# ---- files


def test_a_revocation_that_could_not_be_read_at_first_is_read_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys, opened = pair.believe(), os.open

    def fails(path: str, flags: int, *more: Any, **options: Any) -> int:
        if Path(path) == pair.file:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, *more, **options)

    pair.revoke()
    with caplog.at_level(logging.ERROR, logger=nodes_module.__name__):
        monkeypatch.setattr(os, "open", fails)
        for _ in range(3):
            pair.own.read_again()
        assert pair.own.problem("a", keys) == ""
        (line,) = [each.getMessage() for each in caplog.records]
        assert line == f"the last valid content applies: {pair.file}: cannot be read: Too many open files"
        monkeypatch.setattr(os, "open", opened)
        pair.key_file.write_text("node a\n")  # a fault of this file must not delay revocations
        pair.own.read_again()
    assert " of node a was revoked at " in pair.own.problem("a", keys)
    assert [f"{pair.key_file}: " in each.getMessage() for each in caplog.records] == [False, True]


def test_a_list_with_a_fault_changes_nothing_and_is_told_each_time_that_it_returns(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    keys, good = pair.believe(), pair.file.read_text()
    for number, text in enumerate(("{", good[: len(good) // 2], "", '{"version": 2}')):
        with caplog.at_level(logging.ERROR, logger=nodes_module.__name__):
            pair.file.write_text(text)
            if not text:
                pair.file.unlink()
            pair.own.read_again()
        assert pair.own.problem("a", keys) == ""
        write_public(pair.file, TrustedNodes(1, [Node("a", [PublicPart(pair.keys.public[0].hex())])]))
        pair.own.read_again()
        assert len(caplog.records) == number + 1


def test_a_stamp_shows_changes_that_leave_the_time_of_the_content(pair: Pair) -> None:
    before, status = stamp_of(pair.file), os.stat(pair.file)
    deadline_s = time.monotonic() + 10.0
    while stamp_of(pair.file) == before:  # ctime advances with the kernel's ticks
        os.chmod(pair.file, 0o600)  # changes ctime like chown, which needs root
        os.utime(pair.file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert time.monotonic() < deadline_s
    assert before is not None
    assert status.st_uid == before[-1]
    assert os.stat(pair.file).st_mtime_ns == status.st_mtime_ns


def test_an_input_error_while_a_file_is_read_is_told_as_any_other(tmp_path: Path) -> None:
    """Uses a file that opens, but whose first read fails with EIO."""
    for read in (read_node_keys, read_trusted_nodes):
        with pytest.raises(ConfigError, match="/proc/self/mem: cannot be read: Input/output error"):
            cast(Any, read)(Path("/proc/self/mem"))
        with pytest.raises(ConfigError, match="a folder; "):
            cast(Any, read)(tmp_path)
        os.mkfifo(fifo := tmp_path / f"{read.__name__}.fifo", 0o600)
        with pytest.raises(ConfigError, match="is a pipe or a device, not a file"):
            cast(Any, read)(fifo)


def test_a_rotation_that_was_interrupted_between_the_two_files_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "keys"
    key, public = folder / "a.key", folder / "a.pub"
    assert command(capsys, "new", "a", "--folder", folder)[0] == 0
    (old,) = read_node_keys(key).public

    def full(file: Path, content: object) -> None:
        raise ConfigError(f"{file}: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(node_key_files, "write_public", full)
        assert command(capsys, "rotate", "a", "--folder", folder)[0] == 1
    new, kept = read_node_keys(key).public
    assert (kept, [each.key for each in read_public_part(public).keys]) == (old, [old])
    code, said = command(capsys, "retire", "a", "--folder", folder)
    assert code == 1
    assert f"{public}: lacks the newest key of {key}: a rotation was interrupted; complete it with `pd-clus" in said
    assert read_node_keys(key).public == (new, old), "the listed key must still exist"
    assert command(capsys, "rotate", "a", "--folder", folder, "--expires", "2099-01-31")[0] == 0
    assert read_node_keys(key).public == (new, old)
    parts = read_public_part(public).keys
    assert [(each.key, each.until) for each in parts] == [(new, "2099-01-31"), (old, "")]
    assert command(capsys, "retire", "a", "--folder", folder)[0] == 0
    assert [each.key for each in read_public_part(public).keys] == list(read_node_keys(key).public) == [new]
