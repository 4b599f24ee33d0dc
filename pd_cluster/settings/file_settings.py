"""Settings of /v1/files and /v1/batches."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from pd_cluster.settings.setting import POSITIVE, Panel, Scope, Setting, at_least

HTTP = partial(Setting, panel=Panel.HTTP, scope=Scope.SERVER)


class KeptFiles(msgspec.Struct, frozen=True):
    """The settings of files and batches. `folder` "" disables them. `tenant_mib` limits all files of one tenant."""

    folder: Annotated[
        str,
        HTTP(
            "Folder for the data of /v1/files and /v1/batches; default: none. Needs the extra `files`.",
            name="files_dir",
        ),
    ] = ""
    max_file_mib: Annotated[
        int, HTTP("Maximum MiB of an uploaded file.", name="max_file_size", checks=(at_least(1),))
    ] = 512
    tenant_mib: Annotated[
        int, HTTP("Maximum MiB of a tenant's files.", name="files_tenant_mib", checks=(at_least(1),))
    ] = 4096
    ttl_s: Annotated[
        float, HTTP("Seconds until a file or a finished batch is removed.", name="files_ttl", checks=(POSITIVE,))
    ] = 2_592_000.0
    batch_concurrency: Annotated[
        int,
        HTTP("Maximum number of batch requests at a time while there are no interactive ones.", checks=(at_least(1),)),
    ] = 64
