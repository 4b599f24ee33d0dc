"""Fetches, decodes and resizes pictures of prompts: `python -m pd_cluster.service.prompts.picture_child FD`.

See helpers/children.py. A decoder that is deceived by a file takes this process with it, and no other. Its settings
are the model's rules; a job is a URL.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import msgspec

from pd_cluster.engine.start.process import die_with_parent, leave_signals_to_parent
from pd_cluster.errors import RequestError
from pd_cluster.media.fetch import Places, fetched
from pd_cluster.media.kinds.table import WrittenRules
from pd_cluster.media.pictures import prepared
from pd_cluster.media.rules import ImageRules
from pd_cluster.types import Image

MAX_NBYTES = 1536 << 20  # of address space, beyond the process's use when it is ready
NICENESS = 10


class PictureSettings(msgspec.Struct, frozen=True):
    rules: WrittenRules
    places: Places


class PictureJob(msgspec.Struct, frozen=True):
    """`refused`: addresses of the cluster, which are never connected to."""

    url: str
    refused: tuple[str, ...] = ()


class ReadPicture(msgspec.Struct, frozen=True):
    """A picture as its model reads it and its digest, or an `error` for its sender."""

    image: Image | None = None
    digest: bytes = b""
    error: str = ""


def answer(job: PictureJob, rules: ImageRules, places: Places) -> ReadPicture:
    try:
        return ReadPicture(*prepared(fetched(job.url, places, job.refused), rules))
    except RequestError as error:
        return ReadPicture(error=str(error))
    except MemoryError:
        return ReadPicture(error="it takes too much memory; send a smaller one")


def main(fd: int) -> int:
    die_with_parent()
    leave_signals_to_parent()
    os.nice(NICENESS)
    channel = socket.socket(fileno=fd)
    lines = channel.makefile("rb")
    settings = msgspec.json.decode(lines.readline(), type=PictureSettings)
    rules = settings.rules.read()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_NBYTES, in_use + MAX_NBYTES))
    channel.sendall(b"\n")
    while line := lines.readline():
        body = msgspec.msgpack.encode(answer(msgspec.json.decode(line, type=PictureJob), rules, settings.places))
        channel.sendall(b"#%d\n" % len(body))
        channel.sendall(body)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
