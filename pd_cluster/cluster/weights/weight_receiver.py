"""Runs the process that receives a trainer's tensors (engine/start/receive_weights.py), for the scheduler.

Knows nothing of versions or instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Self

import msgspec

from pd_cluster.errors import DeadlineExceeded, Refused
from pd_cluster.process_messages import JoinTrainer, Received, ReceiveTensors, SentTensor, ToReceiver

MARGIN_S = 5.0  # so that the group's own timeout, whose error says more, comes first


class WeightReceiver:
    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        self._process, self._timeout_s = process, timeout_s

    @classmethod
    async def joined(cls, trainer: JoinTrainer) -> Self:
        """Starts the process, which joins the trainer's group. Raises Refused, DeadlineExceeded."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pd_cluster.engine.start.receive_weights"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        receiver = cls(process, trainer.timeout_s)
        try:
            await receiver._do(trainer)
        except BaseException:
            await receiver.close()
            raise
        return receiver

    async def receive(self, tensors: list[SentTensor], file: Path) -> None:
        """Writes the tensors that the trainer broadcasts, in this order. Raises Refused, DeadlineExceeded."""
        await self._do(ReceiveTensors(tensors, str(file)))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        self.kill()
        await self._process.wait()

    async def _do(self, command: ToReceiver) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s + MARGIN_S):
                self._process.stdin.write(msgspec.json.encode(command) + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise DeadlineExceeded(f"the trainer has sent nothing for {self._timeout_s:g} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise Refused("the process that receives weights has ended; POST /init_weight_transfer_engine again")
        if problem := msgspec.json.decode(line, type=Received).problem:
            raise Refused(f"the trainer's group: {problem}")
