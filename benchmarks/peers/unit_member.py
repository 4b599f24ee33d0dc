"""A rank process whose messages to the mates of its unit are counted, in a file: `unit_member FD COUNT_FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from pd_cluster import wire
from pd_cluster.engine.start import process
from pd_cluster.engine.unit.mates import Mates


def count_messages(count_file: Path) -> None:
    """Writes the number after each message; those of forming are counted, too."""
    plain, num_sent = Mates.send, 0

    def send(mates: Mates, body: wire.Body) -> None:
        nonlocal num_sent
        num_sent += 1
        count_file.write_text(str(num_sent))
        plain(mates, body)

    Mates.send = send  # type: ignore[method-assign]


if __name__ == "__main__":
    count_messages(Path(sys.argv[2]))
    process.end(process.main(int(sys.argv[1])))
