"""Settings of responses that are stored for clients."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from pd_cluster.settings.setting import POSITIVE, Panel, Scope, Setting, at_least

HTTP = partial(Setting, panel=Panel.HTTP, scope=Scope.SERVER)


class KeptResponses(msgspec.Struct, frozen=True):
    """The settings of stored responses. `folder` "" disables them. `tenant_mib` limits all files of one tenant."""

    folder: Annotated[
        str,
        HTTP(
            "Folder that stores answers of /v1/responses; default: none.",
            name="response_store",
        ),
    ] = ""
    tenant_mib: Annotated[
        int,
        HTTP(
            "Maximum MiB of a tenant's stored responses; the oldest are removed first.",
            name="response_store_tenant_mib",
            checks=(at_least(1),),
        ),
    ] = 256
    ttl_s: Annotated[
        float,
        HTTP("Seconds until a stored response is removed.", name="response_store_ttl", checks=(POSITIVE,)),
    ] = 86_400.0
