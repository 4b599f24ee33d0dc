"""Lists, as import strings, what each extra adds to the core, and imports an extra on its first use.

No other module of the core imports extras. An extra is a folder of pd_cluster/extras/. If the folder is missing, each
use of the extra raises an error of one line that names it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pd_cluster.errors import MissingExtra

PACKAGE = "pd_cluster.extras"

ENCODER = "encoders.build_encoder:build_encoder"  # for --role encode
KEY_STORE = "key_file.key_store:KeyStore"  # for --api-key-file; see api/middleware/file_keys
KEY_TABLE = "key_file.key_table:key_table"
LEG_RECORDS = "resumable_streams.resume_records:Records"  # see engine/legs/leg_records
NODE_FILES_CHECK = "node_keys.node_proofs:check_node_files"
NODE_TRUST = "node_keys.node_proofs:Nodes"  # see net/node_trust
REQUEST_LOG = "request_log.generation_log:RequestLog"  # for --enable-log-requests
STREAM_RESUMPTION = "resumable_streams.client_streams:ClientStreams"  # see api/routes/stream_resumption
STAGES = ("encoders.build_encoder:encoder_stages",)  # functions like stages_of of engine/assembly/build_stages
COMMANDS = {  # of `pd-cluster`
    "dashboard": "dashboard.dashboard_command:dashboard",
    "endpoint-picker": "gateway.endpoint_picker_command:endpoint_picker",
    "keys list": "key_file.keys_command:list_keys",
    "keys new": "key_file.keys_command:new",
    "keys node": "node_keys.node_keys_command:app",
    "keys remove": "key_file.keys_command:remove",
    "quantize": "quantize.quantize_command:quantize",
}
API_EXTENSIONS = ("dashboard.dashboard_extension:Dashboard",)  # classes: see api/api_extension


def load(name: str, used_by: str = "") -> Any:
    """Returns `EXTRA.module` or `EXTRA.module:attribute`, imported. Raises MissingExtra.

    `used_by`: the command, flag or name that needs it, for the error.
    """
    path, _, attribute = name.partition(":")
    if not is_installed(name):
        extra = _extra_of(name)
        needs = f"{used_by or path} needs the extra {extra!r}"
        raise MissingExtra(f"{needs}, which this installation lacks: restore pd_cluster/extras/{extra}")
    module = import_module(f"{PACKAGE}.{path}")
    return getattr(module, attribute) if attribute else module


def command(name: str) -> Any:
    """Returns the command of `pd-cluster NAME`: a function whose signature is its command line, or a typer group.

    Raises MissingExtra.
    """
    return load(COMMANDS[name], f"pd-cluster {name}")


def is_installed(name: str) -> bool:
    """Says whether the extra in `name`, which has the form that `load` takes, is installed."""
    try:
        spec = find_spec(f"{PACKAGE}.{_extra_of(name)}")
    except ModuleNotFoundError:  # no extra is installed
        return False
    return spec is not None and spec.origin is not None  # a folder of compiled files alone has no origin


def _extra_of(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]
