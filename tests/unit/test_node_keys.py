"""Node keys: commands and files, proofs between mailboxes over loopback, rotation and revocation."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from pd_cluster import wire
from pd_cluster.cluster.members.cluster_credentials import credentials_of
from pd_cluster.cluster.members.rank_table_place import place_alone
from pd_cluster.commands import cli
from pd_cluster.errors import ConfigError
from pd_cluster.extras.node_keys.node_key_files import NodeKeys, read_node_keys, read_trusted_nodes, write_node_keys
from pd_cluster.extras.node_keys.node_proofs import Nodes
from pd_cluster.net import mailbox as mailbox_module
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.node_trust import NODE_REFUSED
from pd_cluster.net.peer_admission import JOIN_EPOCH, JOIN_PORT, JoinAdmission, Life, join_key
from pd_cluster.net.zmq_sockets import KeyPair
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.process_settings import KeyFiles, PortRange
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools.cluster_keys import write_keys
from ranktable_tools.public_keys import public_key
from ranktable_tools.table_files import PRIVATE
from tests.support.mail import SCHEDULER, SECRET, WAIT_S, Box

TIMES = Timeouts(heartbeat_interval_s=0.02, dead_after_s=2.0, connect_timeout_s=5.0)


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Runs `pd-cluster keys node …`; returns the exit code and the output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pd-cluster", "keys", "node", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    printed = capsys.readouterr()
    code = ended.value.code
    return int(code or 0), printed.out + printed.err


class World:
    """A folder with the keys of nodes a and b, and a list that trusts both."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.file, self._capsys = folder / "keys", folder / "trusted.nodes", capsys

    def make(self) -> None:
        for node in ("a", "b"):
            self.run("new", node, "--folder", self.folder)
        self.run("trust", self.folder / "a.pub", self.folder / "b.pub", "--file", self.file)

    def run(self, *arguments: object) -> str:
        code, said = command(self._capsys, *arguments)
        assert code == 0, said
        return said

    def fails(self, *arguments: object) -> str:
        code, said = command(self._capsys, *arguments)
        assert code == 1, said
        assert said.count("\n") == 1, said
        return said

    def key(self, node: str) -> str:
        return str(self.folder / f"{node}.key")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for a world's files, which the first test fills."""
    return tmp_path_factory.mktemp("template") / "world"


@pytest.fixture
def world(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> World:
    if not template.exists():
        template.mkdir()
        World(template, capsys).make()
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return World(tmp_path, capsys)


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Box]]:
    """Yields a factory of mailboxes. `node`: the file of its key; `trusted`: its list."""
    monkeypatch.setattr(mailbox_module, "READ_AGAIN_S", 0.02)
    made: list[Box] = []

    def make(name: str, epoch: int, node: str = "", trusted: str = "", private: bytes = b"") -> Box:
        """Makes a listening worker, or, given a private key, a scheduler."""
        is_worker = private != SCHEDULER.private
        credentials = Credentials(SECRET, (SCHEDULER.public,), private, b"", node, trusted)
        made.append(Box(name, epoch, "worker" if is_worker else "scheduler", credentials, TIMES, is_worker))
        return made[-1]

    yield make
    for each in made:
        each.mailbox.close()


def scheduler(box: Callable[..., Box], world: World) -> Box:
    return box("scheduler", 1, trusted=str(world.file), private=SCHEDULER.private)


def refusal(server: Box, client: Box) -> str:
    """Returns the reason why a connection did not open, as reported to the connecting end."""
    conn = client.connect_to(server)
    found = client.next("closed")
    assert found[1] == conn
    return str(found[2])


def keys_of(world: World) -> list[tuple[bytes, str]]:
    """Returns node a's keys in the list, with their expiry."""
    found = read_trusted_nodes(world.file).find("a")
    assert found is not None
    return [(each.key, each.until) for each in found.keys]


def await_open(own: Box, other: Box) -> str:
    """Reconnects until the just written list has been read and the connection opens."""
    return str(await_event(own, other, lambda event, conn: event[:2] == ("opened", conn))[1])


def await_event(own: Box, other: Box, wanted: Callable[[tuple[Any, ...], str], bool]) -> tuple[Any, ...]:
    """Reconnects until the wanted answer arrives; ignores other connections' events."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        conn = own.connect_to(other)
        while (event := own.events.get(timeout=WAIT_S))[1] != conn:
            assert event[0] != "fatal", event
        if wanted(event, conn):
            return event
        assert time.monotonic() < deadline_s, event


# ---- keys and files


def test_files_are_for_their_owner_alone(world: World) -> None:
    assert stat.S_IMODE(world.folder.stat().st_mode) == 0o700
    for file in (*world.folder.iterdir(), world.file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    private = read_node_keys(Path(world.key("a"))).private[0].hex()
    for file in (world.folder / "a.pub", world.folder / "b.pub", world.folder / "b.key", world.file):
        assert private not in file.read_text()
    assert world.run("list", "--file", world.file).count("no end") == 2


def test_a_key_is_rotated_and_retired(world: World) -> None:
    (old,) = read_node_keys(Path(world.key("a"))).public
    world.run("rotate", "a", "--folder", world.folder, "--expires", "2099-01-31")
    new, kept = read_node_keys(Path(world.key("a"))).public
    assert kept == old != new
    assert "it has two keys; first complete that" in world.fails("rotate", "a", "--folder", world.folder)
    world.run("trust", world.folder / "a.pub", "--file", world.file)
    assert keys_of(world) == [(new, "2099-01-31"), (old, "")]
    world.run("retire", "a", "--folder", world.folder, "--file", world.file)
    assert read_node_keys(Path(world.key("a"))).public == (new,)
    assert keys_of(world) == [(new, "2099-01-31")]


def test_a_revoked_key_is_never_trusted_again(world: World) -> None:
    world.run("revoke", "a", "--file", world.file)
    known = read_trusted_nodes(world.file)
    assert [each.node for each in known.nodes] == ["b"]
    said = world.fails("trust", world.folder / "a.pub", "--file", world.file)
    (old,) = read_node_keys(Path(world.key("a"))).public
    assert f"{world.file}: key {old.hex()[:12]} of node a was revoked at 20" in said
    assert "`pd-cluster keys node rotate a --folder FOLDER` makes another" in said
    assert "has no node 'a'; it has b" in world.fails("revoke", "a", "--file", world.file)
    world.run("retire", "b", "--file", world.file)
    world.run("rotate", "a", "--folder", world.folder)  # as in docs/operations.md
    (new, _) = read_node_keys(Path(world.key("a"))).public
    world.run("trust", world.folder / "a.pub", "--file", world.file)
    again = read_trusted_nodes(world.file)
    assert keys_of(world) == [(new, "")]
    assert [each.public for each in again.revoked] == [each.public for each in known.revoked] == [old.hex()]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("new", "a", "--folder", "{folder}"), "a.key: already exists; `pd-cluster keys node rotate a` makes"),
        (("new", "../x", "--folder", "{folder}"), "node '../x': expected 1 to 64 letters, digits"),
        (
            ("new", "c", "--folder", "{folder}", "--host", "c.example"),
            "host 'c.example': expected an address",
        ),
        (("new", "c", "--folder", "{folder}", "--expires", "2001-01-01"), "--expires '2001-01-01': is in the past"),
        (("retire", "a"), "--folder, --file: give the folder of a.key, the list of trusted nodes, or both"),
        (("revoke", "a", "--file", "{file}", "--key", "zz"), "node a has no key 'zz'; it has "),
    ],
)
def test_mistakes(world: World, arguments: tuple[str, ...], told: str) -> None:
    said = world.fails(*(each.format(folder=world.folder, file=world.file) for each in arguments))
    assert told in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "Input data was truncated"),
        ('{"nodes": [{"node": "a", "keys": []}]}', "Expected `array` of length >= 1"),
        ('{"nodes": [{"node": "a", "keys": [{"public": "%s"}], "host": []}]}', "unknown field `host`"),
        ('{"nodes": [{"node": "a", "keys": [{"public": "%s", "until": "soon"}]}]}', "node a: until 'soon': expected a"),
        (
            '{"nodes": [{"node": "a", "keys": [{"public": "%s"}], "hosts": ["x"]}]}',
            "node a: host 'x': expected",
        ),
    ],
)
def test_lists_with_faults(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "trusted.nodes"
    file.write_text(text.replace("%s", "ab" * 32))
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"trusted\.nodes: ") as caught:
        read_trusted_nodes(file)
    assert told in str(caught.value)


def test_a_worker_does_not_start_with_a_key_that_its_own_list_refuses(world: World, tmp_path: Path) -> None:
    secret, key, token = write_keys(tmp_path, PRIVATE)
    worker = place_alone("decode", "10.0.0.2", "d", 1)
    own, known = Path(world.key("a")), str(world.file)

    def fault(node_key: str = str(own), trusted_nodes: str = known) -> str:
        with pytest.raises(ConfigError) as caught:
            credentials_of(worker, KeyFiles(str(secret), node_key=node_key, trusted_nodes=trusted_nodes))
        return str(caught.value)

    found = credentials_of(worker, KeyFiles(str(secret), node_key=str(own), trusted_nodes=known))
    assert (found.node_key_file, found.trusted_nodes) == (str(own), known)
    files = KeyFiles(str(secret), str(key), str(token), trusted_nodes=known)
    assert credentials_of(place_alone("scheduler", "10.0.0.1"), files).trusted_nodes == known
    assert "a worker also needs its own key" in fault(node_key="")
    for file, mode in ((own, 0o644), (world.file, 0o666)):
        file.chmod(mode)
        assert f"{file}: mode {mode:04o}, so others can " in fault()
        file.chmod(0o600)
    for node, told in (("a", f"{own}: {known} has another key of node a"), ("c", f"{own}: node c is not in {known}")):
        write_node_keys(own, NodeKeys(node, (b"x" * 32,)))
        assert told in fault()
    world.run("revoke", "b", "--file", world.file)
    assert " of node b was revoked at " in fault(world.key("b"))
    os.remove(world.key("b"))
    assert f"{world.key('b')}: no such file" in fault(world.key("b"), "")


# ---- connections


def test_nodes_are_believed_in_every_direction(box: Callable[..., Box], world: World) -> None:
    one, other = (
        box("decode-0", 7, world.key("a"), str(world.file)),
        box("prefill-0", 8, world.key("b"), str(world.file)),
    )
    own = scheduler(box, world)
    to_one, to_other = own.connect_to(one), own.connect_to(other)
    assert {own.next("opened")[1:3] for _ in range(2)} == {(to_one, "decode-0@7"), (to_other, "prefill-0@8")}
    peers = wire.Peers([one.info, other.info])
    own.mailbox.send(to_one, peers)
    assert one.next("opened")[2] == "scheduler@1"
    assert one.next("message")[2] == peers
    link = other.connect_to(one)
    assert one.next("opened")[2] == "prefill-0@8"
    assert other.next("opened")[2] == "scheduler@1"
    assert other.next("opened")[1:3] == (link, "decode-0@7")


def test_a_nodes_key_does_not_make_another_node(box: Callable[..., Box], world: World, tmp_path: Path) -> None:
    """With node a's key, a worker cannot pose as node b, whether it listens or connects."""
    forged = tmp_path / "forged.key"
    write_node_keys(forged, NodeKeys("b", read_node_keys(Path(world.key("a"))).private))
    false, own = box("decode-0", 7, str(forged)), scheduler(box, world)
    assert "decode-0@7: node b has another key (" in refusal(false, own)
    decode = box("decode-1", 9, world.key("b"), str(world.file))
    told = own.connect_to(decode)
    own.next("opened")
    own.mailbox.send(told, wire.Peers([false.info]))
    assert decode.next("opened")[2] == "scheduler@1"
    assert decode.next("message")
    assert (false.next("opened")[2], false.next("closed")[0]) == ("scheduler@1", "closed")
    assert "decode-0@7: node b has another key (" in refusal(decode, false)
    assert decode.events.empty(), "it must not report that connection"


def test_a_proof_is_good_for_one_pair_of_processes_only(world: World) -> None:
    """A process cannot forward another node's proofs to a third process, or to a later process of the same name."""

    def nodes(own: str, key: KeyPair, node: str = "") -> Nodes:
        credentials = Credentials(SECRET, node_key_file=node, trusted_nodes=str(world.file))
        return Nodes(credentials, own, key.private, key.public)

    pairs = {name: KeyPair.of(b"") for name in ("worker@1", "thief@2", "decode@3")}
    worker = nodes("worker@1", pairs["worker@1"], world.key("b"))
    thief, decode = nodes("thief@2", pairs["thief@2"]), nodes("decode@3", pairs["decode@3"])
    own, other = pairs["worker@1"].public, pairs["thief@2"].public
    node, proofs = worker.proofs_to("thief@2", other, "client")
    assert thief.believe(node, proofs, "worker@1", own, "client").node == "b"
    cases: list[tuple[Nodes, str, bytes, Literal["client", "server"]]] = [
        (decode, "worker@1", own, "client"),
        (decode, "thief@2", other, "client"),
        (thief, "worker@9", own, "client"),
        (thief, "worker@1", own, "server"),
    ]
    for at, name, key, end in cases:
        with pytest.raises(ConfigError, match="claims to be node b, but does not have its key"):
            at.believe(node, proofs, name, key, end)


def test_a_worker_without_a_key_or_at_another_host_is_not_admitted(box: Callable[..., Box], world: World) -> None:
    own = scheduler(box, world)
    assert f"decode-0@7 proves no node, and {world.file} requires one" in refusal(box("decode-0", 7), own)
    world.run("trust", world.folder / "a.pub", "--host", "10.0.0.7", "--host", "fd00::/16", "--file", world.file)
    elsewhere = box("decode-1", 8, world.key("a"))
    event = await_event(own, elsewhere, lambda event, _: event[0] == "closed" and "answers at" in event[2])
    assert f"node a answers at 127.0.0.1, but {world.file} allows it at 10.0.0.7, fd00::/16" in event[2]
    world.run("trust", world.folder / "a.pub", "--host", "127.0.0.0/8", "--file", world.file)
    await_open(own, elsewhere)


def test_old_and_new_keys_are_accepted_and_live_connections_stay(box: Callable[..., Box], world: World) -> None:
    """Either file may change first, and the node's connection stays up during the whole rotation."""
    worker, own = box("decode-0", 7, world.key("a")), scheduler(box, world)
    opened = {await_open(own, worker)}
    for command in (
        ("rotate", "a", "--folder", world.folder),  # the list has only the old key
        ("trust", world.folder / "a.pub", "--file", world.file),
        ("retire", "a", "--folder", world.folder, "--file", world.file),
    ):
        world.run(*command)
        opened.add(await_open(own, worker))
    await_open(own, box("decode-1", 9, world.key("a")))
    for each in opened:
        own.mailbox.send(each, wire.Offer(each, 1))
    said = [worker.events.get(timeout=WAIT_S) for _ in range(8)]
    assert {event[2].transfer_id for event in said if event[0] == "message"} == opened
    assert own.events.empty()


def test_revocation_cuts_a_nodes_connections_and_says_so(
    box: Callable[..., Box], world: World, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good, own = box("decode-0", 7, world.key("a")), box("decode-1", 8, world.key("b")), scheduler(box, world)
    to_bad, to_good = await_open(own, bad), await_open(own, good)
    bad.next("opened"), good.next("opened")
    with caplog.at_level(logging.ERROR, logger=mailbox_module.__name__):
        world.run("revoke", "a", "--file", world.file)
        _, conn, told = own.next("closed")
        assert (conn, " of node a was revoked at " in told) == (to_bad, True)
        assert bad.next("closed")
    why = told.removeprefix(NODE_REFUSED)
    assert [each.getMessage() for each in caplog.records] == [f"closing the connection with decode-0@7: {why}"]
    own.mailbox.send(to_good, wire.Offer("t", 1))
    assert good.next("message")[2] == wire.Offer("t", 1)
    assert " of node a was revoked at " in refusal(bad, own)


def test_a_join_port_asks_for_a_node(box: Callable[..., Box], world: World) -> None:
    port = box("unused", 1, private=SCHEDULER.private)  # used only for its ZAP handler
    credentials = Credentials(SECRET, (SCHEDULER.public,), SCHEDULER.private, trusted_nodes=str(world.file))
    joining = Mailbox(Life(JOIN_PORT, JOIN_EPOCH), "scheduler", credentials, TIMES, admission=JoinAdmission)
    number = joining.bind("127.0.0.1", PortRange())
    joining.start(port)
    try:
        for epoch, node, told in ((5, world.key("a"), ""), (6, "", "d@6 proves no node")):
            worker = box("d", epoch, node, private=join_key(SECRET))
            conn = worker.mailbox.connect(JOIN_PORT, JOIN_EPOCH, "127.0.0.1", number, public_key(SCHEDULER.private))
            event = worker.next("closed" if told else "opened")
            assert event[1] == conn
            assert told in event[2]
        assert port.next("opened")[2] == "d@5"
        world.run("revoke", "a", "--file", world.file)
        assert " of node a was revoked at " in port.next("closed")[2]
    finally:
        joining.close()


def test_without_a_list_nothing_is_asked(box: Callable[..., Box], world: World) -> None:
    own = box("scheduler", 1, private=SCHEDULER.private)
    for epoch, node in ((7, ""), (8, world.key("a"))):
        own.connect_to(box("decode-0", epoch, node))
        assert own.next("opened")[2] == f"decode-0@{epoch}"
