"""Fetches, decodes and resizes images and videos of prompts: `python -m pd_cluster.service.media.media_child FD`.

See concurrency/child_pool.py. A file that crashes a decoder ends only this process. The child's settings are the
model's rules; a job is a URL.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
from pathlib import Path

import msgspec
from msgspec import structs

from pd_cluster.engine.start.rank_main import die_with_parent, leave_signals_to_parent
from pd_cluster.errors import RequestError
from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.image_files import prepared
from pd_cluster.media.image_rules import ImageRules
from pd_cluster.media.kinds.image_kinds import WrittenRules
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.media_fetch import PICTURE, VIDEO, Places, fetched, listed_frames
from pd_cluster.media.processor_options import ReadOptions
from pd_cluster.media.video_files import fitted, frames_of, frames_of_pictures
from pd_cluster.media.video_rules import Video
from pd_cluster.types import Image

MAX_NBYTES = 1536 << 20  # how much address space a process may use beyond that of a ready one
NICENESS = 10


class PictureSettings(msgspec.Struct, frozen=True):
    rules: WrittenRules
    places: Places
    sampling: FrameSampling = FrameSampling()


class PictureJob(msgspec.Struct, frozen=True):
    """`refused`: the cluster's addresses, to which the child never connects. `max_frames`: a video's limit, if it has
    one.
    """

    url: str
    refused: tuple[str, ...] = ()
    is_video: bool = False
    max_frames: int | None = None
    options: ReadOptions = ReadOptions()


class ReadPicture(msgspec.Struct, frozen=True):
    """An image in its model's form with its digest, a video, or an `error` for the client."""

    image: Image | None = None
    digest: bytes = b""
    error: str = ""
    video: Video | None = None
    fetch_s: float = 0.0
    decode_s: float = 0.0


def answer(job: PictureJob, rules: ImageRules, settings: PictureSettings) -> ReadPicture:
    begun_s = time.monotonic()
    try:
        data: bytes | list[bytes] | None = listed_frames(job.url) if job.is_video else None
        if data is None:
            data = fetched(job.url, settings.places, job.refused, VIDEO if job.is_video else PICTURE)
        fetched_s = time.monotonic()
        rules = job.options.rules(rules, "mm_processor_kwargs")
        read = _read(data, job, rules, job.options.sampling(settings.sampling))
        return structs.replace(read, fetch_s=fetched_s - begun_s, decode_s=time.monotonic() - fetched_s)
    except RequestError as error:
        return ReadPicture(error=str(error))
    except MemoryError:
        return ReadPicture(error="it takes too much memory; send a smaller one")


def _read(data: bytes | list[bytes], job: PictureJob, rules: ImageRules, sampling: FrameSampling) -> ReadPicture:
    if not job.is_video:
        assert isinstance(data, bytes)
        return ReadPicture(*prepared(data, rules))
    assert isinstance(rules, GridRules)
    if isinstance(data, list):
        frames = frames_of_pictures(data, sampling, job.max_frames)
    else:
        frames = frames_of(data, sampling, job.max_frames)
    return ReadPicture(video=fitted(frames, rules))


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
        body = msgspec.msgpack.encode(answer(msgspec.json.decode(line, type=PictureJob), rules, settings))
        channel.sendall(b"#%d\n" % len(body))
        channel.sendall(body)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
