"""A rank process that counts its messages to the mates of its unit, in a file: `unit_member FD COUNT_FILE`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from pd_cluster import wire
from pd_cluster.engine.start import process
from pd_cluster.engine.unit.mates import Mates

plain, numbers = Mates.send, itertools.count(1)


def send(mates: Mates, body: wire.Body) -> None:
    Path(sys.argv[2]).write_text(str(next(numbers)))
    plain(mates, body)


if __name__ == "__main__":
    setattr(Mates, "send", send)  # noqa: B010
    process.end(process.main(int(sys.argv[1])))
