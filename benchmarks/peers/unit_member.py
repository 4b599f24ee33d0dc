"""A rank process that counts, in a file, its messages to the other members of its unit: `unit_member FD COUNT_FILE`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from pd_cluster import wire
from pd_cluster.engine.start import rank_main
from pd_cluster.engine.unit.member_connections import MemberConnections

plain, numbers = MemberConnections.send, itertools.count(1)


def send(mates: MemberConnections, body: wire.Body) -> None:
    Path(sys.argv[2]).write_text(str(next(numbers)))
    plain(mates, body)


if __name__ == "__main__":
    setattr(MemberConnections, "send", send)  # noqa: B010
    rank_main.end(rank_main.main(int(sys.argv[1])))
