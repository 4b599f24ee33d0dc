"""The init step of a pod: writes the rank tables of the whole cluster, then waits until this pod's own name works.

Pods have no addresses that last, but names that do. So the tables name hosts, and are made of names and counts alone:
every pod writes the same bytes, whoever starts first, and a pod that comes back is still the one in the others' tables.
A pod sees the devices that it was given as 0, 1, …, so these are its device ids; a device's address is its host.

In --save-dir, mode 0600: global_ranktable.json, local_ranktable.json, node_ports (for NODE_PORTS_FILE) and, with
--secrets, copies of cluster.secret and, for the scheduler, of scheduler.key and admin.token, beside the table.

Knows nothing of Kubernetes' API. Exit status: 0, 1 for what does not work, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ranktable_tools import Device, RankTable, RankTableError, Role, Server, check
from ranktable_tools.files import write_private
from ranktable_tools.hosts import HOST_EXPECTED, is_host
from ranktable_tools.keys import ADMIN_TOKEN_FILE, SCHEDULER_KEY_FILE, SECRET_FILE
from ranktable_tools.tables import local_table, server_group

POLL_S = 0.5
WORKERS: tuple[Role, Role] = ("prefill", "decode")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ranktable_init.py", description="Write the tables, wait for the names.")
    parser.add_argument("--me", required=True, metavar="HOST", help="this pod's host as the tables name it")
    parser.add_argument("--scheduler", required=True, metavar="HOST")
    for role in WORKERS:
        parser.add_argument(f"--{role}", required=True, metavar="PATTERN", help="hosts; {} is 0, 1, …")
        parser.add_argument(f"--num-{role}", type=int, required=True, metavar="N")
        parser.add_argument(f"--{role}-devices", type=int, default=1, metavar="N", help="of each instance; default: 1")
        parser.add_argument(f"--{role}-port", type=int, required=True, metavar="PORT")
    parser.add_argument("--save-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--secrets", type=Path, metavar="DIR", help="the mounted Secret, whose files are to be copied")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for the names; default: 300")
    return parser.parse_args(argv)


def servers(args: argparse.Namespace, role: Role) -> tuple[Server, ...]:
    """Raises ValueError for a count or a pattern that makes no table."""
    pattern, count, num_devices = (getattr(args, name) for name in (role, f"num_{role}", f"{role}_devices"))
    if count < 1 or num_devices < 1:
        raise ValueError(f"--num-{role} {count}, --{role}-devices {num_devices}: at least 1 of each")
    if "{}" not in pattern and count > 1:
        raise ValueError(f"--{role} {pattern}: has no {{}} for the number, and there are {count}")
    hosts = [_host(f"--{role}", pattern.replace("{}", str(index))) for index in range(count)]
    return tuple(Server(host, host, tuple(Device(str(i), host, str(i)) for i in range(num_devices))) for host in hosts)


def _host(option: str, text: str) -> str:
    if not is_host(text):
        raise ValueError(f"{option} {text}: expected {HOST_EXPECTED}")
    return text


def make_table(args: argparse.Namespace) -> RankTable:
    scheduler = Server(_host("--scheduler", args.scheduler), args.scheduler)
    groups = [server_group("scheduler", (scheduler,)), *(server_group(role, servers(args, role)) for role in WORKERS)]
    return RankTable("1.0", "completed", tuple(groups))


def write_tables(args: argparse.Namespace) -> tuple[RankTable, Server]:
    """Also the entry that this pod is. Raises ValueError, OSError or RankTableError."""
    table = make_table(args)
    assert table.scheduler is not None
    everybody = {server.server_ip: server for server in (table.scheduler, *table.instances)}
    mine = everybody.get(args.me)
    if mine is None:
        raise ValueError(
            f"--me {args.me}: the tables have {', '.join(everybody)}; is --num-prefill or --num-decode old?"
        )
    ports = [args.prefill_port] * args.num_prefill + [args.decode_port] * args.num_decode
    path = write_private(args.save_dir / "global_ranktable.json", table.to_json())
    local = write_private(args.save_dir / "local_ranktable.json", local_table("1.0", mine).to_json())
    write_private(args.save_dir / "node_ports", ",".join(map(str, ports)) + "\n")
    if args.secrets is not None:
        for name in (SECRET_FILE,) if mine.device else (SECRET_FILE, SCHEDULER_KEY_FILE, ADMIN_TOKEN_FILE):
            write_private(args.save_dir / name, (args.secrets / name).read_text(encoding="utf-8"))
    for fault in check(path, [local], node_ports=ports):
        raise fault.error()
    return table, mine


def is_mine(host: str) -> bool:
    """Whether the name is an address of this pod: a name server may still tell that of its last life."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))
    except OSError:
        return False


def wait_for(hosts: Sequence[str], works: Callable[[str], bool], timeout_s: float) -> list[str]:
    """Until all of them work; those that still don't when the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while (left := [host for host in hosts if not works(host)]) and time.monotonic() < deadline_s:
        time.sleep(min(POLL_S, max(0.0, deadline_s - time.monotonic())))
    return left


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        table, mine = write_tables(args)
    except (ValueError, OSError, RankTableError) as error:
        print(f"ranktable_init.py: {error}", file=sys.stderr)
        return 1
    if mine.device:  # a worker binds to its own name, and is told the others' addresses
        lost = wait_for([mine.server_ip], is_mine, args.timeout)
        reason = "is no address of this pod; has the headless Service publishNotReadyAddresses, and is --me right?"
    else:  # who is missing must not keep the scheduler from serving with the others
        lost = wait_for([server.server_ip for server in table.instances], resolves, args.timeout)
        reason = "cannot be resolved; is the pod scheduled, and has the headless Service publishNotReadyAddresses?"
    for host in lost:
        print(f"ranktable_init.py: after {args.timeout:g} s {host} {reason}", file=sys.stderr)
    return 1 if lost and mine.device else 0


if __name__ == "__main__":
    sys.exit(main())
