"""Reads the bytes of a picture or video at a URL. Blocks; runs in a child process.

Every refusal is a RequestError. Knows nothing of the contents.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import reprlib
import stat
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.media.media_download import Downloads, downloaded

MAX_FILE_NBYTES = 24 << 20
FRAMES = "video/jpeg"  # the media type of data: URLs with the frames of a video
DATA = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*(?P<is_base64>;base64)?,", re.ASCII)
FILE = "file://"


class Places(msgspec.Struct, frozen=True):
    """The allowed sources of pictures, besides `data:` URLs. `local_root` "": no files."""

    local_root: str = ""
    domains: tuple[str, ...] = ()

    @property
    def known(self) -> str:
        """Names the allowed kinds of URLs."""
        more = [FILE] * bool(self.local_root) + ["http(s)://"] * bool(self.domains)
        return " or ".join(["data: URLs", *more])


class MediaKind(NamedTuple):
    """The expected kind of file. `kind`: the first part of its media type. `name`: its name in messages."""

    kind: str
    name: str
    max_nbytes: int


PICTURE = MediaKind("image", "picture", MAX_FILE_NBYTES)
VIDEO = MediaKind("video", "video", 128 << 20)


def fetched(url: str, places: Places, refused: tuple[str, ...] = (), sort: MediaKind = PICTURE) -> bytes:
    """Returns a picture's or video's file. `refused`: addresses that are never allowed. Raises RequestError."""
    scheme = url[:10].partition(":")[0].lower()
    if scheme == "data":
        head = _head(url, sort)
        return _decoded(url[head.end() :], sort)
    if scheme == "file" and places.local_root:
        return _read(url, places.local_root, sort)
    if scheme in ("http", "https") and places.domains:
        return downloaded(url, Downloads(places.domains, refused, sort.max_nbytes, sort.kind))
    ways_out = {"file": "--allowed-local-media-path", "http": "--allowed-media-domains"}
    hint = ways_out.get(scheme.removesuffix("s"))
    more = f"; the server's {hint} would allow it" if hint else ""
    raise RequestError(f"{reprlib.repr(url[:60])}: {sort.kind}s come as {places.known}; send one of these{more}")


def listed_frames(url: str) -> list[bytes] | None:
    """Returns the frames' files of a `data:video/jpeg` URL; None for another URL. Raises RequestError."""
    if not url[:200].lower().startswith(f"data:{FRAMES};base64,"):
        return None
    head = _head(url, VIDEO)
    return [_decoded(each, PICTURE) for each in url[head.end() :].split(",")]


def _head(url: str, sort: MediaKind) -> re.Match[str]:
    head = DATA.match(url[:200])
    if head is None or head["is_base64"] is None:
        raise RequestError(f"a data: URL must be data:{sort.kind}/TYPE;base64,DATA; send it in this form")
    if head["type"] is not None and not head["type"].startswith(f"{sort.kind}/"):
        article = "an" if sort.kind == "image" else "a"
        raise RequestError(f"a data: URL of {head['type']}: not a {sort.name}; send {article} {sort.kind}/… one")
    return head


def _decoded(data: str, sort: MediaKind) -> bytes:
    if len(data) * 3 // 4 > sort.max_nbytes + 3:
        raise _too_large(sort)
    try:
        return base64.b64decode(data.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise RequestError("the data of its URL are not base64; encode them anew") from None


def _too_large(sort: MediaKind) -> RequestError:
    return RequestError(f"a {sort.name}'s file has at most {sort.max_nbytes} bytes; send a smaller one")


def _read(url: str, root: str, sort: MediaKind) -> bytes:
    """Reads a regular file below `root`.

    Checks the opened file again, because a link may have changed meanwhile.
    """
    path = unquote_to_bytes(url[len(FILE) :])
    refusal = RequestError("a file:// URL must name a file below the server's --allowed-local-media-path")
    inside = os.path.realpath(root)
    if not path.startswith(b"/") or b"\0" in path or not _is_inside(os.fsdecode(os.path.realpath(path)), inside):
        raise refusal
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise refusal from None
    real = os.readlink(f"/proc/self/fd/{descriptor}")
    if not _is_inside(real, inside) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(sort.max_nbytes + 1)
    if len(data) > sort.max_nbytes:
        raise _too_large(sort)
    return data


def _is_inside(path: str, folder: str) -> bool:
    """Whether `path` is in `folder` or below it; both are real paths."""
    return os.path.commonpath([folder, path]) == folder
