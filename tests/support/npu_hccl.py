"""Simulates ProcessGroupHCCL between processes over gloo, with the same calls, order and failures; for
npu_simulated.py.

As in HCCL, a group connects in its first call, which waits for the other ranks without a limit; calls run in order;
work with a dead rank ends only when this end aborts the communicator.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from tests.support.npu_devices import launched

CONNECT_S = 120.0  # the smallest HCCL_CONNECT_TIMEOUT
HOST = "127.0.0.1"


class Options:
    """The used options of ProcessGroupHCCL."""

    def __init__(self) -> None:
        self._timeout = timedelta(seconds=CONNECT_S)
        self.hccl_config: dict[str, object] = {}
        self.group_id = ""
        self.global_ranks_in_group: list[int] = []


class HcclWork:
    """A pending call. As in HCCL, `wait` does not raise the call's error."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_over = threading.Event()
        self._has_failed = False

    def end(self, has_failed: bool = False) -> None:
        self._has_failed = has_failed
        self._is_over.set()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def is_success(self) -> bool:
        return self._is_over.is_set() and not self._has_failed

    def wait(self) -> None:
        """Makes the host wait; HCCL makes the current stream wait, but launches run at once here."""
        if not self._is_over.wait(self._timeout_s):
            raise RuntimeError("EI0002: a rank did not take part within HCCL_EXEC_TIMEOUT")


class HcclOverGloo:
    Options = Options
    real: Any = None  # torch-npu's own class, which must have every method of this one

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert options.global_ranks_in_group == list(range(size))
        assert options.group_id
        self.rank, self.size = rank, size
        self._store = PrefixStore(f"hccl-{options.group_id}", store)
        self._timeout_s = options._timeout.total_seconds()
        self._gloo: ProcessGroupGloo | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], HcclWork] | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._connecting = threading.Lock()
        threading.Thread(target=self._run, name="hccl", daemon=True).start()

    def _connect(self) -> None:
        with self._connecting:
            if self._gloo is None:
                options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
                options._timeout = timedelta(seconds=CONNECT_S)
                self._gloo = ProcessGroupGloo(self._store, self.rank, self.size, options)

    @torch.inference_mode()
    def _run(self) -> None:
        """Runs a call, writing also to tensors made in inference mode, as a device can."""
        while (taken := self._calls.get()) is not None:
            call, work = taken
            try:
                call(self._gloo).wait(timedelta(days=1))
                work.end()
            except RuntimeError:
                self._aborted.wait()  # a device waits for a dead rank until the communicator is aborted
                work.end(has_failed=True)

    def _begin(self, call: Callable[[Any], Any]) -> HcclWork:
        if self._aborted.is_set():
            raise RuntimeError("the HCCL communicator was aborted")
        self._connect()

        def launch() -> HcclWork:
            work = HcclWork(self._timeout_s)
            self._calls.put((call, work))
            return work

        return launched(launch)

    # ---- methods that pd_cluster calls

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> HcclWork:
        return self._begin(lambda gloo: gloo.allreduce(tensors, options))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> HcclWork:
        return self._begin(lambda gloo: gloo.allgather(outputs, inputs))

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        given_sizes: list[int],
        options: Any,
    ) -> HcclWork:
        """Takes one dimension only: torch's sizes count rows, torch-npu's count elements."""
        assert output.dim() == given.dim() == 1
        assert output.is_contiguous()
        assert given.is_contiguous()
        assert len(output_sizes) == len(given_sizes) == self.size
        assert (sum(output_sizes), sum(given_sizes)) == (len(output), len(given))
        return self._begin(lambda gloo: gloo.alltoall_base(output, given, output_sizes, given_sizes))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> HcclWork:
        return self._begin(lambda gloo: gloo.broadcast(tensors, options))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> HcclWork:
        return self._begin(lambda gloo: gloo.send(tensors, rank, 0))  # messages arrive in order, so tags are not needed

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> HcclWork:
        return self._begin(lambda gloo: gloo.recv(tensors, rank, 0))

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def abort_hccl_comm(self, reason: str | None) -> None:
        self._aborted.set()
        if self._gloo is not None:
            self._gloo.abort()

    def shutdown(self) -> None:
        self._calls.put(None)
