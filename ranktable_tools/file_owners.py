"""Users and groups of files: a file's owner, this process's user, and a group's number."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

_MAX_ID = 2**31 - 1


def owner_of(file: Path) -> str:
    """Returns a text such as `mode 0600 of root:root`, if this process may search the parent folders."""
    try:
        status = file.stat()
    except OSError:
        return "a folder that may not be searched"
    return f"mode {stat.S_IMODE(status.st_mode):04o} of {_user(status.st_uid)}:{_group(status.st_gid)}"


def reader() -> str:
    """Returns this process's user as a text such as `ma-user (uid 1000, gid 100)`."""
    return f"{_user(os.geteuid())} (uid {os.geteuid()}, gid {os.getegid()})"


def group_id_of(text: str) -> int | None:
    """Returns the number of a group of this machine, or a number unchanged; None for any other text."""
    if text.isascii() and text.isdigit():
        return int(text) if len(text) < 11 and int(text) <= _MAX_ID else None
    try:
        return grp.getgrnam(text).gr_gid
    except (KeyError, ValueError):
        return None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
