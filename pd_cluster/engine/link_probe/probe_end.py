"""One end of a trial transfer: `python -m pd_cluster.engine.link_probe.probe_end` (see probe_messages.py).

The process has a pool on a rank's device, and one link at a time, but no model and no engine.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec
import torch

from pd_cluster.devices.device import Device, bind, use
from pd_cluster.engine.link_probe.probe_links import LAYOUT, ReceivingEnd, SendingEnd, content_of
from pd_cluster.engine.link_probe.probe_messages import (
    NOBODY,
    NUM_BLOCKS,
    BeginProbes,
    Command,
    Compare,
    Listen,
    ProbeAnswer,
    Send,
)
from pd_cluster.engine.start.rank_main import die_with_parent
from pd_cluster.errors import LinkError, PdClusterError, told
from pd_cluster.kv.kv_pool import KVPool

AGAIN_S = 0.2  # between two attempts to reach the other end, which may not have started yet


class ProbeEnd:
    """The pool of this process, and its end of one link at a time."""

    def __init__(self) -> None:
        self._begin: BeginProbes
        self.pool: KVPool
        self.receiving: ReceivingEnd | None = None

    def answer(self, command: Command) -> ProbeAnswer:
        """Raises PdClusterError."""
        match command:
            case BeginProbes():
                return self._make_pool(command)
            case Listen():
                self.receiving = ReceivingEnd(self._begin, command, self.pool)
                return ProbeAnswer(port=self.receiving.port, epoch=self.receiving.epoch)
            case Send():
                return self._send(command)
            case Compare():
                return self._compare(command)

    def _make_pool(self, command: BeginProbes) -> ProbeAnswer:
        self._begin = command
        device = bind(command.device, command.device_ids, command.rank)
        use(device)
        self.pool = _pool_on(device)
        for block in range(NUM_BLOCKS) if command.role == "prefill" else ():
            self.pool.put_block(block, content_of(command.seed, block))
        return ProbeAnswer(device=f"{device.kind}:{device.index}" if device.is_accelerator else device.kind)

    def _send(self, command: Send) -> ProbeAnswer:
        end = self._linked(command)
        try:
            return ProbeAnswer(
                transfers_s=[end.timed_transfer(number) for number in range(command.num_transfers)],
                transport=end.transport,
            )
        finally:
            end.mailbox.close()

    def _linked(self, command: Send) -> SendingEnd:
        """Links to the other end. Retries for `wait_s`, because the other end may not have started yet.

        Raises LinkError.
        """
        deadline_s = time.monotonic() + command.wait_s
        while True:
            end = SendingEnd(self._begin, command, self.pool)
            try:
                end.link(command)
                return end
            except LinkError as error:
                end.mailbox.close()
                if end.was_connected or not command.wait_s:
                    raise
                if time.monotonic() > deadline_s:
                    raise LinkError(NOBODY) from error
                time.sleep(AGAIN_S)

    def _compare(self, command: Compare) -> ProbeAnswer:
        receiving, self.receiving = self.receiving, None
        assert receiving is not None, "Compare before Listen"
        try:
            receiving.compare(command)
        finally:
            receiving.close()
            self.pool.clear(list(range(NUM_BLOCKS)))  # the next link must not find the same content
        return ProbeAnswer()


def _pool_on(device: Device) -> KVPool:
    return KVPool(LAYOUT, NUM_BLOCKS, device)


def main() -> None:
    """Answers commands until stdin ends. The output of libraries goes to stderr."""
    die_with_parent()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    decoder = msgspec.json.Decoder(Command)
    end = ProbeEnd()
    for line in sys.stdin.buffer:
        try:
            answer = end.answer(decoder.decode(line))
        except PdClusterError as error:
            answer = ProbeAnswer(error=told(error.text))
        answers.write(msgspec.json.encode(answer) + b"\n")
    os._exit(0)  # threads of links and sockets need no clean-up


if __name__ == "__main__":
    main()
