"""Gets the bytes of a picture from where its URL says. Runs in a child process, and blocks.

Every refusal is a RequestError. Knows nothing of what is in the bytes.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import reprlib
import stat
from urllib.parse import unquote_to_bytes

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.media.download import Downloads, downloaded

MAX_FILE_NBYTES = 24 << 20
DATA = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*(?P<is_base64>;base64)?,", re.ASCII)
FILE = "file://"


class Places(msgspec.Struct, frozen=True):
    """Where pictures may be from, besides `data:` URLs. `local_root`: "" for no files."""

    local_root: str = ""
    domains: tuple[str, ...] = ()

    @property
    def known(self) -> str:
        """Names the kinds of URLs that are taken."""
        more = [FILE] * bool(self.local_root) + ["http(s)://"] * bool(self.domains)
        return " or ".join(["data: URLs", *more])


def fetched(url: str, places: Places, refused: tuple[str, ...] = ()) -> bytes:
    """Returns a picture's file. `refused`: addresses that are never connected to. Raises RequestError."""
    scheme = url[:10].partition(":")[0].lower()
    if scheme == "data":
        return _decoded(url)
    if scheme == "file" and places.local_root:
        return _read(url, places.local_root)
    if scheme in ("http", "https") and places.domains:
        return downloaded(url, Downloads(places.domains, refused, MAX_FILE_NBYTES))
    ways_out = {"file": "--allowed-local-media-path", "http": "--allowed-media-domains"}
    hint = ways_out.get(scheme.removesuffix("s"))
    more = f"; the server's {hint} would allow it" if hint else ""
    raise RequestError(f"{reprlib.repr(url[:60])}: images come as {places.known}; send it so{more}")


def _decoded(url: str) -> bytes:
    head = DATA.match(url[:200])
    if head is None or head["is_base64"] is None:
        raise RequestError("a data: URL must be data:image/TYPE;base64,DATA; send it so")
    if head["type"] is not None and not head["type"].startswith("image/"):
        raise RequestError(f"a data: URL of {head['type']}: not a picture; send an image/… one")
    if (len(url) - head.end()) * 3 // 4 > MAX_FILE_NBYTES + 3:
        raise RequestError(f"a picture's file has at most {MAX_FILE_NBYTES} bytes; send a smaller one")
    try:
        return base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise RequestError("the data of its URL are not base64; encode them anew") from None


def _read(url: str, root: str) -> bytes:
    """Reads a regular file below `root`.

    Nothing else is opened on purpose; the file that was opened is checked again, because a link may change meanwhile.
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
        data = file.read(MAX_FILE_NBYTES + 1)
    if len(data) > MAX_FILE_NBYTES:
        raise RequestError(f"a picture's file has at most {MAX_FILE_NBYTES} bytes; send a smaller one")
    return data


def _is_inside(path: str, folder: str) -> bool:
    """Both are real paths."""
    return os.path.commonpath([folder, path]) == folder
