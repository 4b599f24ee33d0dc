"""Two command lines of one implementation: `pd-ranktable gen | merge | keys | check | show`, and the reference
document's `--mode gen|merge`. Exit status: 0, 1 for a fault in a table, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from ranktable_tools import machine_probe
from ranktable_tools.check import check, permission_warnings
from ranktable_tools.cluster_keys import where_to_copy, write_keys
from ranktable_tools.errors import RankTableError
from ranktable_tools.file_owners import group_id_of
from ranktable_tools.foreign_fields import foreign_fields
from ranktable_tools.gen import generate, write
from ranktable_tools.host_addresses import HOST_EXPECTED, is_shared_host
from ranktable_tools.merge import MERGED_NAME, merge
from ranktable_tools.ports import NODE_PORTS, GivenPorts, outgoing_warnings, parse_node_ports, scheduler_ports
from ranktable_tools.public_keys import NoImplementation
from ranktable_tools.schema import load_global
from ranktable_tools.show import render
from ranktable_tools.table_files import PRIVATE, Access, write_file
from ranktable_tools.table_types import RankTable
from ranktable_tools.unit_entries import OPTIONS as UNIT_OPTIONS
from ranktable_tools.unit_entries import open_units, unit_names

_GEN_EXAMPLE: Final = "--prefill-server-list 4,5 --decode-server-list 6,7 --api-server --save-dir ./save_dir"
_MERGE_EXAMPLE: Final = (
    "--global-ranktable-list ./ranktable/global_ranktable_10.0.0.18.json"
    " ./ranktable/global_ranktable_10.0.0.19.json --save-dir ./save_dir"
)
ENCODERS: Final = (
    "Encoders are in no rank table: start each with `pd-cluster serve --role encode --join SCHEDULER:PORT`,\n"
    "where PORT is the scheduler's --join-port."
)
_COMMAND: Final = "_command"
_MERGE_ONLY: Final = ("global_ranktable_list",)
_GEN_ONLY: Final = ("prefill_server_list", "decode_server_list", "api_server", "device_ip", "server_ip")


class _Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors, no abbreviations, and the nearest name for an unknown option."""

    def __init__(self, *, prog: str, description: str, example: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n  {prog} {example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.options = ["--help"]

    def option(self, name: str, **settings: object) -> None:
        self.options.append(name)
        self.add_argument(name, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def refuse_unknown(self, argv: Sequence[str]) -> None:
        for word in argv:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self.options:
                near = difflib.get_close_matches(name, self.options, n=1, cutoff=0.5)
                self.error(f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pd-ranktable`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    top = _Parser(prog="pd-ranktable", description="Write, merge and check rank tables.")
    commands = {
        "gen": _gen_parser(),
        "merge": _merge_parser(),
        "keys": _keys_parser(),
        "check": _check_parser(),
        "show": _show_parser(),
    }
    listed = "\n".join(f"  {name:<6} {parser.description}" for name, parser in commands.items())
    top.epilog = f"commands:\n{listed}\n\n`pd-ranktable COMMAND --help` describes a command."
    top.usage = "pd-ranktable {gen,merge,keys,check,show} ..."
    if not argv or argv[0] in ("-h", "--help"):
        top.print_help()
        return 0 if argv else 2
    parser = commands.get(argv[0])
    if parser is None:
        near = difflib.get_close_matches(argv[0], commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(commands)}"
        top.error(f"unknown command {argv[0]!r}; {hint}")
    parser.refuse_unknown(argv[1:])
    return _run(parser, parser.parse_args(argv[1:]))


def reference_main(argv: Sequence[str] | None = None) -> int:
    """Runs `pd_ranktable_tools.py --mode gen|merge …`: the reference document's command line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(
        prog="pd_ranktable_tools.py",
        description="Write a machine's rank tables (gen), or merge the global ones (merge).",
        example=f"--mode gen {_GEN_EXAMPLE}\n  pd_ranktable_tools.py --mode merge {_MERGE_EXAMPLE}",
    )
    parser.option("--mode", required=True, choices=("gen", "merge"), help="what to do")
    _add_gen_options(parser)
    _add_merge_options(parser)
    _add_save_dir(parser)
    parser.refuse_unknown(argv)
    args = parser.parse_args(argv)
    if args.mode == "merge" and not args.global_ranktable_list:
        parser.error("--mode merge needs --global-ranktable-list FILE [FILE ...]")
    without_effect = _GEN_ONLY if args.mode == "merge" else _MERGE_ONLY
    if ignored := [f"--{name.replace('_', '-')}" for name in without_effect if getattr(args, name)]:
        print(f"note: {', '.join(ignored)} has no effect with --mode {args.mode}", file=sys.stderr)
    setattr(args, _COMMAND, _gen if args.mode == "gen" else _merge)
    return _run(parser, args)


def _run(parser: _Parser, args: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = getattr(args, _COMMAND)
    try:
        return command(args)
    except (RankTableError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _gen_parser() -> _Parser:
    parser = _Parser(prog="pd-ranktable gen", description="Write this machine's rank tables.", example=_GEN_EXAMPLE)
    parser.epilog = f"{parser.epilog}\n\n{ENCODERS}"
    _add_gen_options(parser)
    _add_save_dir(parser)
    parser.set_defaults(**{_COMMAND: _gen})
    return parser


def _merge_parser() -> _Parser:
    parser = _Parser(
        prog="pd-ranktable merge",
        description="Merge the global rank tables of several machines.",
        example=_MERGE_EXAMPLE,
    )
    _add_merge_options(parser, required=True)
    _add_unit_options(parser)
    _add_save_dir(parser)
    parser.set_defaults(**{_COMMAND: _merge})
    return parser


def _keys_parser() -> _Parser:
    parser = _Parser(
        prog="pd-ranktable keys",
        description="Write cluster.secret, scheduler.key and admin.token for existing tables.",
        example="--save-dir ./save_dir",
    )
    _add_save_dir(parser)
    parser.set_defaults(**{_COMMAND: _keys})
    return parser


def _check_parser() -> _Parser:
    parser = _Parser(
        prog="pd-ranktable check",
        description="Find every fault of a set of tables before it serves.",
        example="save_dir/global_ranktable_10.0.0.18.json --local save_dir/local_ranktable_10.0.0.18_*.json"
        " --node-ports 8088,8089 --port 9000 --tensor-parallel-size 2",
    )
    parser.add_argument("table", type=Path, metavar="GLOBAL_TABLE")
    parser.option("--local", type=Path, nargs="*", action="extend", default=[], metavar="FILE")
    parser.option("--node-ports", metavar="PORT,PORT", help="NODE_PORTS: prefill first, as `show` numbers them")
    parser.option("--tensor-parallel-size", type=int, metavar="N", help="devices of each instance")
    _add_unit_options(parser)
    parser.option("--port", type=_port, help="the scheduler's public port")
    parser.option("--admin-port", type=_port, metavar="PORT", help="the scheduler's admin port (default: --port + 1)")
    parser.option("--join-port", type=_port, metavar="PORT", help="the scheduler's port for workers outside the tables")
    parser.option("--kv-port-range", type=_port_range, metavar="FIRST-LAST", help="the instances' control sockets")
    parser.set_defaults(**{_COMMAND: _check})
    return parser


def _show_parser() -> _Parser:
    parser = _Parser(
        prog="pd-ranktable show",
        description="Print a global rank table in readable form.",
        example="save_dir/global_ranktable_10.0.0.18.json",
    )
    parser.add_argument("table", type=Path, metavar="GLOBAL_TABLE")
    _add_unit_options(parser)
    parser.set_defaults(**{_COMMAND: _show})
    return parser


def _add_gen_options(parser: _Parser) -> None:
    for role in ("prefill", "decode"):
        parser.option(
            f"--{role}-server-list",
            type=_instance,
            nargs="*",
            action="extend",
            default=[],
            metavar="ID,ID",
            help=f"device ids of each {role} instance on this machine, instances separated by spaces",
        )
    parser.option(
        "--api-server", action="store_true", help="the scheduler runs on this machine; give it on one machine only"
    )
    parser.option(
        "--server-ip", type=_host, help="this machine's address (default: that of the default route, or the only one)"
    )
    parser.option("--device", choices=("auto", "npu", "gpu", "cpu"), default="auto", help="default: auto")
    parser.option(
        "--device-ip",
        type=_device_ip,
        action="append",
        default=[],
        metavar="ID=ADDRESS",
        help="a device's address, if hccn_tool cannot report it; may be repeated",
    )
    _add_unit_options(parser)


def _add_merge_options(parser: _Parser, required: bool = False) -> None:
    parser.option(
        "--global-ranktable-list",
        type=Path,
        nargs="+",
        action="extend",
        required=required,
        metavar="FILE",
        help="the global rank tables to merge",
    )


def _add_unit_options(parser: _Parser) -> None:
    for role, option in UNIT_OPTIONS.items():
        parser.option(option, type=_size, metavar="N", help=f"--data-parallel-size of the {role} instances")


def _unit_sizes(args: argparse.Namespace) -> dict[str, int]:
    """Returns role -> instances per unit."""
    found = {role: getattr(args, option[2:].replace("-", "_")) for role, option in UNIT_OPTIONS.items()}
    return {role: size for role, size in found.items() if size is not None}


def _add_save_dir(parser: _Parser) -> None:
    parser.option("--save-dir", type=Path, default=Path(), metavar="DIR", help="default: the current folder")
    parser.option(
        "--file-mode", type=_file_mode, metavar="MODE", help="the files' mode (default: 0600, with --group 0640)"
    )
    parser.option(
        "--group", type=_group, metavar="NAME|GID", help="the files' group, whose members may read them; a name or gid"
    )


def _access(args: argparse.Namespace) -> Access:
    mode = args.file_mode
    if mode is None:
        mode = PRIVATE.mode if args.group is None else 0o640
    if mode & 0o007:
        print(
            f"note: --file-mode {mode:04o}: all users of this machine can read the tables; cluster.secret, "
            f"scheduler.key and admin.token stay private (--group lets a group read them)",
            file=sys.stderr,
        )
    return Access(mode, args.group)


def _file_mode(text: str) -> int:
    mode = int(text, 8) if re.fullmatch(r"(0o|0)?[0-7]{3}", text) else 0
    if mode & 0o600 != 0o600 or mode & ~0o644:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected an octal mode with which only the owner can write, such as 0640"
        )
    return mode


def _group(text: str) -> int:
    number = group_id_of(text)
    if number is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: this machine has no such group; give its number, as `id -g` prints it in the container"
        )
    return number


def _instance(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text, flags=re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: expected the device ids of one instance, such as 4,5")
    return [int(part) for part in text.split(",")]


def _host(text: str) -> str:
    if not is_shared_host(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {HOST_EXPECTED}")
    return text


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port from 1 to 65535")
    return int(text)


def _size(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of instances, 1 or more")
    return int(text)


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    found = _port(first), _port(last or first)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FIRST-LAST, such as 7000-7010")
    return found


def _device_ip(text: str) -> tuple[int, str]:
    match = re.fullmatch(r"([0-9]{1,9})=(.+)", text, flags=re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: expected ID=ADDRESS, such as 4=10.0.0.22")
    return int(match[1]), _host(match[2])


def _gen(args: argparse.Namespace) -> int:
    generated = generate(
        prefill=args.prefill_server_list,
        decode=args.decode_server_list,
        api_server=args.api_server,
        server_ip=args.server_ip or _default_server_ip(),
        device_kind=_detected_kind() if args.device == "auto" else args.device,
        device_ips=dict(args.device_ip),
    )
    access = _access(args)
    written = write(generated, args.save_dir, access)
    for path in written:
        print(path)
    for line in open_units(generated.global_table, _unit_sizes(args)):
        print(f"note: {line}", file=sys.stderr)
    _add_keys(generated.global_table, written[0], access)
    return 0


def _add_keys(table: RankTable, path: Path, access: Access) -> None:
    """Writes keys next to a complete table. A machine's part of a table gets none, because `merge` writes them.

    If the host cannot compute a public key, prints where the keys can be made; the tables are complete without keys.
    """
    if table.scheduler is None or not table.prefill or not table.decode:
        return
    try:
        written = write_keys(path.parent, access)
    except NoImplementation:
        print(
            "note: no keys were made: this host has neither pyzmq nor an openssl with X25519; "
            f"run `pd-ranktable keys --save-dir DIR` on a host with pd-cluster, and copy its files next to {path.name}",
            file=sys.stderr,
        )
        return
    for key in written:
        print(key)
    for line in where_to_copy(table, path):
        print(line)


def _detected_kind() -> machine_probe.DeviceKind:
    kind = machine_probe.detect_kind()
    if kind == "cpu":
        print(
            "note: no NPU and no GPU is visible here: the table is for CPUs; use --device for another kind",
            file=sys.stderr,
        )
    return kind


def _default_server_ip() -> str:
    """Returns this machine's address. Raises RankTableError if several are possible."""
    address = machine_probe.default_server_ip()
    if address is not None:
        return address
    found = machine_probe.global_addresses()
    if len(found) > 1:
        expected = "one address: there is no default route to choose by"
        raise RankTableError(
            "gen", "--server-ip", " ".join(found), expected, f"give one, such as --server-ip {found[0]}"
        )
    if found:
        print(f"note: no default route, so --server-ip is {found[0]}, the only address", file=sys.stderr)
        return found[0]
    print(
        "note: this machine has no address, so --server-ip is 127.0.0.1, which works on one machine only",
        file=sys.stderr,
    )
    return "127.0.0.1"


def _merge(args: argparse.Namespace) -> int:
    table = merge(args.global_ranktable_list, lambda line: print(f"note: {line}", file=sys.stderr), _unit_sizes(args))
    access = _access(args)
    path = write_file(args.save_dir / MERGED_NAME, table.to_json(), access)
    print(path)
    _add_keys(table, path, access)
    return 0


def _keys(args: argparse.Namespace) -> int:
    for path in write_keys(args.save_dir, _access(args)):
        print(path)
    return 0


def _check(args: argparse.Namespace) -> int:
    for warning in permission_warnings([args.table, *args.local]):
        print(f"warning: {warning}", file=sys.stderr)
    given = GivenPorts(scheduler_ports(args.port, args.admin_port, args.join_port), args.kv_port_range)
    sizes = _unit_sizes(args)
    faults = check(args.table, args.local, args.node_ports, args.tensor_parallel_size, given, sizes)
    for warning in () if faults else outgoing_warnings(_named_ports(args.node_ports, given)):
        print(f"warning: {warning}", file=sys.stderr)
    for fault in faults:
        print(fault)
    if not faults:
        table = load_global(args.table)
        kept = ", ".join(field for field, _ in foreign_fields(table))
        if kept:
            print(f"note: fields of other programs, which have no meaning here: {kept}", file=sys.stderr)
        names = ", ".join(filter(None, dict.fromkeys(unit_names(table, sizes))))
        told = f"; units {names}" if names else ""
        print(f"ok: 1 scheduler, {len(table.prefill)} prefill, {len(table.decode)} decode{told}")
    return 1 if faults else 0


def _named_ports(node_ports: str | None, given: GivenPorts) -> dict[str, int]:
    ports = [] if node_ports is None else parse_node_ports(node_ports)
    named = {f"{NODE_PORTS}: [{index}]": port for index, port in enumerate(ports)}
    named.update(given.scheduler)
    named.update({} if given.kv_range is None else {"--kv-port-range": given.kv_range[1]})
    return named


def _show(args: argparse.Namespace) -> int:
    print(render(load_global(args.table), _unit_sizes(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
