"""Simulated hosts: network namespaces on their own bridge, whose cables a test can pull.

They are invisible to the machine's network and have no names: a namespace exists as long as the process that holds it,
which always ends with the test's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.cluster.processes.launcher import Member
from ranktable_tools import generate, write
from ranktable_tools.merge import merge
from ranktable_tools.table_files import write_private
from tests.support.cluster import LiveCluster

NETWORK = "10.213.7"
HUB = "hub"
CLONE_NEWNET = 0x40000000


class CannotMakeNamespaces(Exception):
    """Explains why this machine or user cannot make namespaces."""


@contextlib.contextmanager
def visited(names: Sequence[str]) -> Iterator[Network]:
    """Yields a network of these hosts and the hub, with this thread on the hub; skips the test where there is none."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Network(names))
        except CannotMakeNamespaces as error:
            pytest.skip(f"no network namespaces here: {error}")
        stack.enter_context(made.visit())
        yield made


class Network:
    """`with Network(names) as network:` makes the hub, which has the bridge, and a host for each name."""

    def __init__(self, names: Sequence[str]) -> None:
        self.addresses = {name: f"{NETWORK}.{at + 1}" for at, name in enumerate((HUB, *names))}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Network:
        try:
            self._build()
        except (CannotMakeNamespaces, subprocess.CalledProcessError) as error:
            self.close()
            said = getattr(error, "stderr", b"") or b""
            raise CannotMakeNamespaces(f"{error} {said.decode(errors='replace').strip()}".strip()) from None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait(10)

    def _build(self) -> None:
        if os.geteuid() != 0:
            raise CannotMakeNamespaces("only root may make network namespaces")
        if missing := [tool for tool in ("ip", "nsenter", "unshare", "cat") if shutil.which(tool) is None]:
            raise CannotMakeNamespaces(f"not installed: {', '.join(missing)}")
        for name in self.addresses:
            self._hold(name)
            self.ip(name, "link set lo up")
        self.ip(HUB, "link add bridge0 type bridge")
        self.ip(HUB, f"addr add {self.addresses[HUB]}/24 dev bridge0")
        self.ip(HUB, "link set bridge0 up")
        for name in self.hosts:
            self.ip(HUB, f"link add to-{name} type veth peer name eth0 netns {self._holders[name].pid}")
            self.ip(HUB, f"link set to-{name} master bridge0")
            self.ip(HUB, f"link set to-{name} up")
            self.ip(name, f"addr add {self.addresses[name]}/24 dev eth0")
            self.ip(name, "link set eth0 up")

    def _hold(self, name: str) -> None:
        """Starts the process that holds the namespace. It ends when its input does, at the latest with this process."""
        holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._holders[name] = holder
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"there\n")
            holder.stdin.flush()
        if holder.stdout.readline() != b"there\n":  # cat responds as soon as it runs in the namespace
            raise CannotMakeNamespaces(holder.stderr.read().decode(errors="replace").strip())

    @property
    def hosts(self) -> list[str]:
        return [name for name in self.addresses if name != HUB]

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """Returns a command that executes `command` on that host, without a further process."""
        return ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "--", *command]

    def ip(self, name: str, arguments: str) -> None:
        command = self.inside(name, ["ip", *arguments.split()])
        subprocess.run(command, check=True, capture_output=True, timeout=10)

    # ---- cables

    def pull(self, name: str) -> None:
        """Disconnects a host in both directions."""
        self.ip(HUB, f"link set to-{name} down")

    def plug(self, name: str) -> None:
        self.ip(HUB, f"link set to-{name} up")

    def part(self, *names: str) -> None:
        """Disconnects these hosts from each other; the hub still reaches them all."""
        for name in names:
            self.ip(HUB, f"link set dev to-{name} type bridge_slave isolated on")

    def join(self, *names: str) -> None:
        for name in names:
            self.ip(HUB, f"link set dev to-{name} type bridge_slave isolated off")

    # ---- a thread's namespace

    def enter(self, name: str = HUB) -> None:
        """Makes the calling thread open its new sockets on that host."""
        _enter(Path(f"/proc/{self._holders[name].pid}/ns/net"))

    @contextlib.contextmanager
    def visit(self, name: str = HUB) -> Iterator[None]:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.enter(name)
            yield
        finally:
            _set_namespace(home)
            os.close(home)


class SpreadCluster(LiveCluster):
    """A cluster over a network's hosts: the scheduler on the hub, each instance on the host given by `where`.

    Clients must be on the hub (`Network.enter`), where the scheduler serves at the loopback address.
    """

    def __init__(self, network: Network, where: dict[str, str], folder: Path, model: Path, **settings: Any) -> None:
        roles = [name.partition("-")[0] for name in where]
        num_encode = roles.count("encode")
        super().__init__(
            folder, model, roles.count("prefill"), roles.count("decode"), num_encode=num_encode, **settings
        )
        self._network = network
        self._where = {**where, "scheduler": HUB}

    def plan(self) -> list[Member]:
        """Plans the processes of `pd-cluster up`, each on its host according to the rank tables."""
        tables = self._write_tables()
        return [self._moved(member, tables) for member in super().plan()]

    def _write_tables(self) -> Path:
        """Writes a rank table for each host, as its operator would; returns the merged table's file."""
        parts = []
        for host, address in self._network.addresses.items():
            prefill, decode = (self._devices(host, role) for role in ("prefill", "decode"))
            if not prefill and not decode and host != HUB:  # a host with encoders only
                continue
            made = generate(
                prefill=prefill,
                decode=decode,
                api_server=host == HUB,
                server_ip=address,
                device_kind="cpu",
                device_ips=None,
            )
            parts.append(write(made, self.folder)[0])
        return write_private(self.folder / "global_ranktable_merge.json", merge(parts).to_json())

    def _here(self, host: str) -> list[str]:
        return [name for name, its_host in self._where.items() if its_host == host and name != "scheduler"]

    def _devices(self, host: str, role: str) -> list[list[int]]:
        return [ids for name, ids in self._devices_of(host).items() if name.startswith(role)]

    def _devices_of(self, host: str) -> dict[str, list[int]]:
        """Returns the devices of each instance on this host, one for each rank."""
        rest = itertools.count()
        return {name: [next(rest) for _ in range(self.launch.tp_size_of(name))] for name in self._here(host)}

    def address_of(self, name: str) -> str:
        return self._network.addresses[self._where[name]]

    def _moved(self, member: Member, table: Path) -> Member:
        host = self._where[member.name]
        address = self._network.addresses[host]
        is_scheduler = member.name == "scheduler"
        if member.name.startswith("encode"):  # encoders are in no table and register at the hub
            port = next(flag for flag in member.command if flag.startswith("--join=")).rpartition(":")[2]
            own = [f"--host={address}", f"--advertise-host={address}", f"--join={self._network.addresses[HUB]}:{port}"]
            return replace(member, command=self._network.inside(host, [*member.command, *own]))
        slot = "host" if is_scheduler else "".join(map(str, self._devices_of(host)[member.name]))
        local = self.folder / f"local_ranktable_{address}_{slot}.json"
        names = {"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(local)}
        own_host = "0.0.0.0" if is_scheduler and self.launch.num_encode else "" if is_scheduler else address
        command = [*member.command, *([f"--host={own_host}"] if own_host else [])]  # the last flag wins
        return replace(member, command=self._network.inside(host, command), env={**member.env, **names})


def _enter(namespace: Path) -> None:
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(fd)
    finally:
        os.close(fd)


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
