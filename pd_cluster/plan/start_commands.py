"""Returns the commands that start a layout: on one machine, on several with rank tables, and in Kubernetes.

Addresses, ports and folders are examples; the flags are real.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.plan.layout_candidates import LayoutCandidate
from ranktable_tools.gen import generate
from ranktable_tools.merge import MERGED_NAME

TABLES = "ranktables"
SECRETS = "secrets"
WORKER_PORT, SCHEDULER_PORT, JOIN_PORT = 8088, 9000, 9002
TABLE_DEVICES = {"cpu": "cpu", "cuda": "gpu", "npu": "npu"}  # kinds as pd-ranktable calls them
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
CHART = "deploy/helm/pd-cluster"


@dataclass(frozen=True, slots=True)
class InstancePlacement:
    """The placement of an instance. `index`: its number on its host."""

    role: str
    host: int
    index: int
    devices: tuple[int, ...]

    @property
    def port(self) -> int:
        return WORKER_PORT + self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommands:
    """The commands for one layout. `devices_per_host`: further devices are on another host."""

    model: str
    candidate: LayoutCandidate
    kind: DeviceKind
    devices_per_host: int

    @property
    def places(self) -> list[InstancePlacement]:
        """Returns the placements of all instances, prefill instances first. No instance spans hosts."""
        layout, size = self.candidate.layout, self.candidate.tp_size
        roles = ["prefill"] * layout.num_prefill + ["decode"] * (layout.num_decode + layout.num_hybrid)
        of_host = max(1, self.devices_per_host // size)
        return [
            InstancePlacement(
                role, at // of_host, at % of_host, tuple(range(at % of_host * size, (at % of_host + 1) * size))
            )
            for at, role in enumerate(roles)
        ]

    @property
    def worker_flags(self) -> list[str]:
        layout = self.candidate.layout
        chunk = f"--max-num-batched-tokens={layout.max_num_batched_tokens}"
        seats = f"--max-num-seqs={layout.max_num_seqs}"
        return [*([chunk] if layout.max_num_batched_tokens else []), *([seats] if layout.max_num_seqs else [])]

    @property
    def scheduler_flags(self) -> list[str]:
        return [f"--routing-policy={self.candidate.layout.routing_policy}"]

    @property
    def on_several_hosts(self) -> bool:
        return any(place.host for place in self.places)

    @property
    def on_this_machine(self) -> list[str]:
        """Returns the command lines for one host; empty if the layout needs several."""
        if self.on_several_hosts:
            return []
        layout = self.candidate.layout
        sizes = f"--prefill {layout.num_prefill} --decode {layout.num_decode}"
        if self.candidate.is_hybrid:
            sizes = f"--hybrid {layout.num_hybrid}"
        ranks = f" --tensor-parallel-size {self.candidate.tp_size}" * (self.candidate.tp_size > 1)
        flags = shlex.join([*self.worker_flags, *self.scheduler_flags])
        return [f"pd-cluster up --model {shlex.quote(self.model)} {sizes}{ranks} -- {flags}"]

    @property
    def joining(self) -> list[str]:
        """Returns the lines that start hybrid instances: decode instances in a cluster without prefill instances."""
        files = {"scheduler-key": "scheduler.key", "admin-token": "admin.token"}
        of_scheduler = [f"--{name}-file={SECRETS}/{file}" for name, file in files.items()]
        common = [f"--model={self.model}", *self.worker_flags, *self.scheduler_flags]
        common += [f"--secret-file={SECRETS}/cluster.secret"]
        size = [f"--tensor-parallel-size={self.candidate.tp_size}"] if self.candidate.tp_size > 1 else []
        own = [f"--port={SCHEDULER_PORT}", f"--join-port={JOIN_PORT}"]
        scheduler = shlex.join(["pd-cluster", "serve", "--role=scheduler", *own, *common, *of_scheduler])
        scheduler_host = _address(0) if self.on_several_hosts else "127.0.0.1"
        lines = [f"pd-ranktable keys --save-dir {SECRETS}", f"{scheduler} &"]
        for place in self.places:
            lines += self._host_comment(place)
            seen = f"{VISIBLE[self.kind]}={_ids(place)} " if self.kind in VISIBLE else ""
            device = ["--device=npu"] if self.kind == "npu" else []
            join = [f"--join={scheduler_host}:{JOIN_PORT}", f"--port={place.port}", *device, *size]
            lines.append(f"{seen}{shlex.join(['pd-cluster', 'serve', '--role=decode', *join, *common])} &")
        return lines

    @property
    def from_tables(self) -> list[str]:
        """Returns lines for each host and instance of a layout with prefill and decode instances."""
        hosts = sorted({place.host for place in self.places})
        lines = [self._gen(host) for host in hosts]  # each must run on its own host
        tables = [f"{TABLES}/global_ranktable_{_address(host)}.json" for host in hosts]
        if len(hosts) > 1:
            listed = " ".join(tables)
            lines.append(f"pd-ranktable merge --global-ranktable-list {listed} --save-dir {TABLES}")
            tables = [f"{TABLES}/{MERGED_NAME}"]
        ports = ",".join(str(place.port) for place in self.places)
        lines.append(f"export GLOBAL_RANK_TABLE_FILE_PATH={tables[0]} NODE_PORTS={ports} USE_OPENAI=1")
        own = [*self.worker_flags, *self.scheduler_flags]
        for name, port in (each for host in hosts for each in self._local_tables(host)):
            flags = [f"--model={self.model}", f"--tensor-parallel-size={self.candidate.tp_size}", *own]
            start = shlex.join(["sh", "scripts/start_servers.sh", *flags, "--host=0.0.0.0", f"--port={port}"])
            lines.append(f"RANK_TABLE_FILE_PATH={TABLES}/{name} {start}")
        return lines

    def _host_comment(self, place: InstancePlacement) -> list[str]:
        """Returns a comment before the first instance of a host, if there are several hosts."""
        return [f"# on {_address(place.host)}:"] if self.on_several_hosts and not place.index else []

    def _gen(self, host: int) -> str:
        lists = ""
        for role in ("prefill", "decode"):
            if ids := [_ids(place) for place in self.places if place.host == host and place.role == role]:
                lists += f" --{role}-server-list {' '.join(ids)}"
        api_server = " --api-server" * (host == 0)
        device = TABLE_DEVICES[self.kind]
        return f"pd-ranktable gen --server-ip {_address(host)} --device {device}{lists}{api_server} --save-dir {TABLES}"

    def _local_tables(self, host: int) -> list[tuple[str, int]]:
        """Returns a host's local tables, under the names that `pd-ranktable gen` uses, and the instances' ports."""
        here = [place for place in self.places if place.host == host]
        ids = {role: [each.devices for each in here if each.role == role] for role in ("prefill", "decode")}
        made = generate(
            prefill=ids["prefill"],
            decode=ids["decode"],
            api_server=host == 0,
            server_ip=_address(host),
            device_kind="cpu",
        )
        return list(zip(made.locals, [*(place.port for place in here), SCHEDULER_PORT], strict=False))

    @property
    def helm(self) -> list[str]:
        """Returns the command that installs the chart, as a comment, and the values file that it takes, as YAML."""
        layout, flags = self.candidate.layout, list(self.worker_flags)
        numbers = {"prefill": layout.num_prefill, "decode": layout.num_decode + layout.num_hybrid}
        of_kind = f" -f {CHART}/values-{self.kind}.yaml" if self.kind in VISIBLE else ""
        lines = [f"# helm -n pd install pd {CHART}{of_kind} -f plan.yaml", "roles:"]
        for role, number in numbers.items():
            values = {"replicas": number, "devices": self.candidate.tp_size, "args": flags}
            lines.append(f"  {role}: {json.dumps(values)}")
        return [*lines, f"scheduler: {json.dumps({'args': self.scheduler_flags})}"]


def _address(host: int) -> str:
    return f"10.0.0.{host + 11}"


def _ids(place: InstancePlacement) -> str:
    return ",".join(map(str, place.devices))
