"""Settings in front of the API's routes: keys, CORS, TLS. Errors never contain a key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.file_settings import KeptFiles
from pd_cluster.settings.request_log_settings import RequestLogSettings
from pd_cluster.settings.response_settings import KeptResponses
from pd_cluster.settings.routing_settings import ConnectionLimits
from pd_cluster.settings.setting import NEGATED, TEXTS, Form, Panel, Scope, Setting, declared, variable_of, within

MAX_HEADER_FIELDS = 4096  # their size is limited, too
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # as browsers send it: no path, no trailing slash
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADER_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
KEY_VARIABLE = "VLLM_API_KEY"
KEYS_VARIABLE, METRICS_KEY_VARIABLE = variable_of("api_key"), variable_of("metrics_key")

HTTP = partial(Setting, panel=Panel.HTTP, scope=Scope.SERVER)


def _strings(wanted: re.Pattern[str], example: str) -> Form:
    """Returns the form of a JSON list of such strings, like `["*"]`."""

    def of_text(name: str, text: str) -> tuple[str, ...]:
        try:
            found = msgspec.json.decode(text, type=tuple[str, ...])
        except msgspec.DecodeError:
            raise ConfigError(
                f"""{called(name)} {text!r}: expected a JSON list of strings, such as '["*"]'"""
            ) from None
        for each in found:
            if not wanted.fullmatch(each):
                raise ConfigError(f"""{called(name)} {each!r}: expected "*", or what looks like {example}""")
        return found

    return Form(str, of_text, lambda values: msgspec.json.encode(values).decode())


def _root_path(name: str, path: str) -> str:
    root = path.rstrip("/")
    if root and not ROOT_PATH.fullmatch(root):
        raise ConfigError(f"{called(name)} {path!r}: expected a path such as /api, of letters, digits and . _ ~ -")
    return root


def _endpoint(name: str, url: str) -> str:
    """Returns the URL, with OTLP's own path if it has none. Raises ConfigError."""
    if not url:
        return ""
    if url.startswith("grpc"):
        raise ConfigError(
            f"{called(name)} {url!r}: traces are sent over HTTP; give the collector's HTTP port, such as "
            "http://collector:4318/v1/traces"
        )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{called(name)} {url!r}: expected a URL such as http://collector:4318/v1/traces")
    return url if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


ORIGINS, TOKENS = _strings(ORIGIN, "https://example.com"), _strings(HEADER_TOKEN, "x-session-id")


class Tls(msgspec.Struct, frozen=True):
    """Files in PEM. `keyfile` is "" where the certificate's file also has the key.

    `cert_reqs`: whether clients show a certificate of `ca_certs`: 0 no, 1 those that want to, 2 all.
    """

    certfile: Annotated[
        str, HTTP("TLS: the certificate, in PEM, read again when it changes.", name="ssl_certfile", default="")
    ]
    keyfile: Annotated[str, HTTP("TLS: its key; default: in the certificate's file.", name="ssl_keyfile")] = ""
    ca_certs: Annotated[str, HTTP("TLS: the authorities that sign clients' certificates.", name="ssl_ca_certs")] = ""
    cert_reqs: Annotated[
        int, HTTP("TLS: client certificates. 0: not requested, 1: optional, 2: required.", name="ssl_cert_reqs")
    ] = 0

    def checked(self) -> Tls | None:
        """Returns itself, or None without a certificate. The files are read on use. Raises ConfigError."""
        if not self.certfile:
            for each in declared(Tls):
                if value := getattr(self, each.field):
                    needed = f"needs {called('ssl_certfile')} FILE, the server's certificate"
                    raise ConfigError(f"{called(each.name)} {value}: {needed}")
            return None
        requests = f"{called('ssl_cert_reqs')} {self.cert_reqs}"
        if self.cert_reqs not in (0, 1, 2):
            raise ConfigError(f"{requests}: expected 0, 1 or 2")
        if self.cert_reqs and not self.ca_certs:
            raise ConfigError(f"{requests}: needs {called('ssl_ca_certs')} FILE, who signs for clients")
        return self


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings in front of the API's routes. `root_path`: the prefix that a proxy strips from every path.

    `tenants`: a name for each key, or none: then each key is a separate tenant. `shares_prefix_cache`: tenants share
    cached prompts. `key_file` has further keys, as hashes. `metrics_key` gives access to /metrics and /load alone;
    with only other keys, nobody can read /metrics. `returns_request_ids`: every answer has x-request-id. `has_docs`:
    /docs and /openapi.json. `has_public_dashboard`: /dashboard.
    """

    api_keys: Annotated[
        tuple[str, ...],
        HTTP(
            "Clients must send one of these keys; default: VLLM_API_KEY. Only /health, /ping and /live stay open.",
            name="api_key",
            form=TEXTS,
            is_several=True,
            is_secret=True,
            variable=KEY_VARIABLE,
        ),
    ] = ()
    key_file: Annotated[
        str,
        HTTP(
            "Further keys with tenants, models and limits, by `pd-cluster keys`; read again at SIGHUP.",
            name="api_key_file",
        ),
    ] = ""
    metrics_key: Annotated[
        str,
        HTTP("A key for /metrics and /load only.", is_secret=True),
    ] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        HTTP(
            "CORS: a JSON list of origins; [] turns CORS off. Default: any, none if there are keys.",
            default=None,
            form=ORIGINS,
        ),
    ] = ("*",)
    tenants: Annotated[
        tuple[str, ...],
        HTTP(
            "Tenants of the keys, in their order; default: one each. Keys of a tenant share cached prompts.",
            name="api_key_tenant",
            form=TEXTS,
            is_several=True,
        ),
    ] = ()
    shares_prefix_cache: Annotated[
        bool,
        HTTP(
            "Share cached prompts between keys; response times then reveal them.",
            name="shared_prefix_cache",
        ),
    ] = False
    allowed_methods: Annotated[tuple[str, ...], HTTP("CORS: a JSON list of methods.", form=TOKENS)] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], HTTP("CORS: a JSON list of headers.", form=TOKENS)] = ("*",)
    allow_credentials: Annotated[bool, HTTP("CORS: allow credentials such as cookies.")] = False
    root_path: Annotated[
        str, HTTP("The path under which a proxy shows this server.", form=Form(str, _root_path, str))
    ] = ""
    returns_request_ids: Annotated[
        bool,
        HTTP("Send x-request-id in answers: the client's own or a new one.", name="enable_request_id_headers"),
    ] = False
    has_docs: Annotated[
        bool, HTTP("Do not serve /docs and /openapi.json.", name="disable_fastapi_docs", form=NEGATED)
    ] = True
    traces_endpoint: Annotated[
        str,
        HTTP(
            "URL for OpenTelemetry traces, such as http://collector:4318/v1/traces. Extra otel.",
            name="otlp_traces_endpoint",
            form=Form(str, _endpoint, str),
        ),
    ] = ""
    max_header_fields: Annotated[
        int,
        HTTP(
            "Most header fields of a request; others get a 431.",
            name="h11_max_header_count",
            checks=(within(16, MAX_HEADER_FIELDS),),
        ),
    ] = 256
    has_public_dashboard: Annotated[
        bool,
        HTTP(
            "Show figures at /dashboard of the public port, for key holders; needs TLS or a loopback --host.",
            name="public_dashboard",
        ),
    ] = False
    connections: ConnectionLimits = ConnectionLimits()
    tls: Tls | None = None
    responses: KeptResponses = KeptResponses()
    files: KeptFiles = KeptFiles()
    log: RequestLogSettings = RequestLogSettings()

    def __repr__(self) -> str:
        """Leaves keys out."""
        hidden = {each.field for each in declared(HttpConfig) if each.setting.is_secret}
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in hidden)
        return f"HttpConfig({', '.join(shown)})"

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys or self.key_file)

    def with_tenants(self, source: str, keys: Sequence[str], has_origins: bool) -> HttpConfig:
        """Returns a copy with these keys, deduplicated. Keys close CORS unless origins are given. Raises ConfigError.

        `source`: the origin of the keys, for errors.
        """
        check_keys(source, keys)
        tenant_of = _tenants(source, keys, self.tenants)
        if self.metrics_key:
            check_keys(called("metrics_key"), [self.metrics_key])
        if self.metrics_key in tenant_of:
            name = called("metrics_key")
            raise ConfigError(f"{name}: is one of the API keys, too; give another, which opens /metrics only")
        changes: dict[str, Any] = {"api_keys": tuple(tenant_of)}
        if self.tenants:
            changes["tenants"] = tuple(tenant_of.values())
        if not has_origins and (tenant_of or self.key_file):
            changes["allowed_origins"] = ()
        return msgspec.structs.replace(self, **changes)


def check_keys(source: str, keys: Sequence[str]) -> None:
    """Raises ConfigError for keys that no client could send or that are easy to guess; it does not show them."""
    for at, key in enumerate(keys, 1):
        place = f"{source}, key {at} of {len(keys)}" if len(keys) > 1 else source
        if not key:
            raise ConfigError(f"{place}: empty; give a key, or leave it out to serve everybody")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(f"{place}: keys have printable ASCII characters only, and no spaces")


def _tenants(source: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns each key and its tenant's name, "" without names. Raises ConfigError, which never contains a key."""
    if not names:
        return dict.fromkeys(keys, "")
    setting = called("api_key_tenant")
    if len(names) != len(keys):
        raise ConfigError(
            f"{setting}: {len(names)} for {len(keys)} of {source}; give a name for each key, in their order"
        )
    found: dict[str, str] = {}
    for at, (key, name) in enumerate(zip(keys, names, strict=True), 1):
        if not TENANT.fullmatch(name):
            raise ConfigError(f"{setting} {name!r}: expected 1 to 64 letters, digits and . _ -")
        if found.setdefault(key, name) != name:
            raise ConfigError(
                f"{setting} {name!r}: key {at} of {source} is {found[key]!r}'s already; give each tenant its own"
            )
    return found
