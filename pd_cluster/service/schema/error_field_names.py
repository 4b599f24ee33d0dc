"""Renames the fields in errors of a chat that was converted from another API's request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pd_cluster.errors import RequestError


@contextmanager
def with_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the fields in RequestErrors of the block. `names`: a chat's field -> the client's name for it."""
    try:
        yield
    except RequestError as error:
        field, message = error.param or "", str(error)
        if field not in names:
            raise
        name = names[field]
        if message.startswith(field):
            message = name + message.removeprefix(field)
        raise RequestError(message, param=re.split(r"[.\[]", name)[0], code=error.code) from None
