"""Settings of responses that are kept for clients."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from pd_cluster.settings.setting import POSITIVE, Panel, Scope, Setting, at_least

HTTP = partial(Setting, panel=Panel.HTTP, scope=Scope.SERVER)


class KeptResponses(msgspec.Struct, frozen=True):
    """`folder` "" keeps nothing. `tenant_mib`: the files of one tenant together."""

    folder: Annotated[
        str,
        HTTP(
            "Folder to keep answers of /v1/responses in; default: none.",
            name="response_store",
        ),
    ] = ""
    tenant_mib: Annotated[
        int,
        HTTP(
            "Most MiB of a tenant's kept responses; the oldest make room.",
            name="response_store_tenant_mib",
            checks=(at_least(1),),
        ),
    ] = 256
    ttl_s: Annotated[
        float,
        HTTP("Seconds until a kept response is removed.", name="response_store_ttl", checks=(POSITIVE,)),
    ] = 86_400.0
