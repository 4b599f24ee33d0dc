"""Gets the bytes of a picture from where its URL says. Runs in a child process, and blocks.

Every refusal is a RequestError. Knows nothing of what is in the bytes.
"""

from __future__ import annotations

import base64
import binascii
import re
import reprlib

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.media.pictures import MAX_FILE_NBYTES

DATA = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*(?P<is_base64>;base64)?,", re.ASCII)
KINDS = "data: URLs with base64"


class Places(msgspec.Struct, frozen=True):
    """Where pictures may be from, besides `data:` URLs."""

    local_root: str = ""  # "": no files
    domains: tuple[str, ...] = ()


def fetched(url: str, places: Places) -> bytes:
    """Returns a picture's file. Raises RequestError."""
    scheme = url[:10].partition(":")[0].lower()
    if scheme == "data":
        return _decoded(url)
    raise RequestError(f"{reprlib.repr(url[:60])}: pictures come as {KINDS}; send one")


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
