"""A process that receives a trainer's tensors: `python -m pd_cluster.engine.start.receive_weights`.

The process joins a torch.distributed group that the trainer opens, and writes the tensors that rank 0 broadcasts to
safetensors files. Commands and answers are lines of JSON on standard input and output; end of file ends the process.
The process receives only tensors, never objects. Knows nothing of models.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import msgspec

from pd_cluster.engine.start.rank_main import die_with_parent
from pd_cluster.process_messages import JoinTrainer, Received, ReceiveTensors, ToReceiver

DEVICES = {"gloo": "cpu", "nccl": "cuda", "hccl": "npu"}


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    backend = "gloo"
    for line in sys.stdin.buffer:
        command = msgspec.json.decode(line, type=ToReceiver)
        problem = ""
        try:
            if isinstance(command, JoinTrainer):
                backend = command.backend
                _join(command)
            else:
                _receive(command, DEVICES[backend])
        except (RuntimeError, ValueError, OSError, ImportError) as error:  # raised by the libraries
            problem = " ".join(str(error).split())[:1000] or type(error).__name__
        sys.stdout.buffer.write(msgspec.json.encode(Received(problem)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _join(trainer: JoinTrainer) -> None:
    if trainer.address in ("127.0.0.1", "::1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed

    if trainer.backend == "hccl":
        import torch_npu  # noqa: F401
    host = f"[{trainer.address}]" if ":" in trainer.address else trainer.address
    torch.distributed.init_process_group(
        trainer.backend,
        init_method=f"tcp://{host}:{trainer.port}",
        rank=trainer.rank,
        world_size=trainer.world_size,
        timeout=timedelta(seconds=trainer.timeout_s),
    )


def _receive(wanted: ReceiveTensors, device: str) -> None:
    import torch.distributed
    from safetensors.torch import save_file

    found = {}
    for each in wanted.tensors:
        tensor = torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=device)
        torch.distributed.broadcast(tensor, src=0)
        found[each.name] = tensor.cpu()
    save_file(found, Path(wanted.path), {"format": "pt"})


if __name__ == "__main__":
    sys.exit(main())
