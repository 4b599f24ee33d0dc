"""Settings of the HTTP server outside the API's routes: keys, CORS, TLS. Errors never contain a key."""

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

MAX_HEADER_FIELDS = 4096  # the total size of header fields is limited, too
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # an origin as browsers send it: no path, no trailing slash
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADER_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
KEY_VARIABLE = "VLLM_API_KEY"
KEYS_VARIABLE, METRICS_KEY_VARIABLE = variable_of("api_key"), variable_of("metrics_key")

HTTP = partial(Setting, panel=Panel.HTTP, scope=Scope.SERVER)


def _strings(wanted: re.Pattern[str], example: str) -> Form:
    """Returns the form of a JSON list of strings that match `wanted`, such as `["*"]`."""

    def of_text(name: str, text: str) -> tuple[str, ...]:
        try:
            found = msgspec.json.decode(text, type=tuple[str, ...])
        except msgspec.DecodeError:
            raise ConfigError(
                f"""{called(name)} {text!r}: expected a JSON list of strings, such as '["*"]'"""
            ) from None
        for each in found:
            if not wanted.fullmatch(each):
                raise ConfigError(f"""{called(name)} {each!r}: expected "*", or a text such as {example}""")
        return found

    return Form(str, of_text, lambda values: msgspec.json.encode(values).decode())


def _root_path(name: str, path: str) -> str:
    root = path.rstrip("/")
    if root and not ROOT_PATH.fullmatch(root):
        raise ConfigError(f"{called(name)} {path!r}: expected a path such as /api, of letters, digits and . _ ~ -")
    return root


def _endpoint(name: str, url: str) -> str:
    """Returns the URL, with OTLP's default path if it has none. Raises ConfigError."""
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
    """PEM files. `keyfile` is "" if the certificate's file also contains the key.

    `cert_reqs`: whether clients must show a certificate that `ca_certs` signed; 0: no, 1: optional, 2: yes.
    """

    certfile: Annotated[
        str, HTTP("TLS: PEM file of the certificate, read again when it changes.", name="ssl_certfile", default="")
    ]
    keyfile: Annotated[
        str, HTTP("TLS: PEM file of the certificate's key; default: the certificate's file.", name="ssl_keyfile")
    ] = ""
    ca_certs: Annotated[
        str, HTTP("TLS: PEM file of the authorities that sign clients' certificates.", name="ssl_ca_certs")
    ] = ""
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
            raise ConfigError(
                f"{requests}: needs {called('ssl_ca_certs')} FILE, the authorities that sign clients' certificates"
            )
        return self


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server outside the API's routes."""

    api_keys: Annotated[
        tuple[str, ...],
        HTTP(
            "Keys, one of which clients must send; default: VLLM_API_KEY. Only /health, /ping and /live stay open.",
            name="api_key",
            form=TEXTS,
            is_several=True,
            is_secret=True,
            variable=KEY_VARIABLE,
        ),
    ] = ()
    key_file: Annotated[  # the file has hashes of the keys
        str,
        HTTP(
            "File of further keys with their tenants and limits, made by `pd-cluster keys`; read again at SIGHUP.",
            name="api_key_file",
        ),
    ] = ""
    # If other keys exist and this one does not, /metrics is closed.
    metrics_key: Annotated[
        str,
        HTTP("Key that opens only /metrics and /load.", is_secret=True),
    ] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        HTTP(
            "CORS: a JSON list of origins; [] turns CORS off. Default: any; none if keys are required.",
            default=None,
            form=ORIGINS,
        ),
    ] = ("*",)
    tenants: Annotated[  # empty: each key is a separate tenant
        tuple[str, ...],
        HTTP(
            "The tenant of each key, in order; default: one per key. Keys of a tenant share cached prompts.",
            name="api_key_tenant",
            form=TEXTS,
            is_several=True,
        ),
    ] = ()
    shares_prefix_cache: Annotated[
        bool,
        HTTP(
            "Share cached prompts between tenants; response times then reveal what others have sent.",
            name="shared_prefix_cache",
        ),
    ] = False
    allowed_methods: Annotated[tuple[str, ...], HTTP("CORS: a JSON list of allowed methods.", form=TOKENS)] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], HTTP("CORS: a JSON list of allowed headers.", form=TOKENS)] = ("*",)
    allow_credentials: Annotated[bool, HTTP("CORS: allow credentials such as cookies.")] = False
    root_path: Annotated[  # a proxy strips it from every path
        str, HTTP("Path prefix under which a proxy serves this server.", form=Form(str, _root_path, str))
    ] = ""
    returns_request_ids: Annotated[
        bool,
        HTTP("Send x-request-id in answers: the client's value or a new one.", name="enable_request_id_headers"),
    ] = False
    has_docs: Annotated[  # whether /docs is served; the flag says the opposite
        bool, HTTP("Do not serve /docs and /openapi.json.", name="disable_fastapi_docs", form=NEGATED)
    ] = True
    traces_endpoint: Annotated[
        str,
        HTTP(
            "URL for OpenTelemetry traces, such as http://collector:4318/v1/traces. Needs the extra otel.",
            name="otlp_traces_endpoint",
            form=Form(str, _endpoint, str),
        ),
    ] = ""
    max_header_fields: Annotated[
        int,
        HTTP(
            "Maximum number of header fields of a request; requests with more get a 431.",
            name="h11_max_header_count",
            checks=(within(16, MAX_HEADER_FIELDS),),
        ),
    ] = 256
    has_public_dashboard: Annotated[
        bool,
        HTTP(
            "Serve /dashboard at the public port, for holders of a key; needs TLS or a loopback --host.",
            name="public_dashboard",
        ),
    ] = False
    connections: ConnectionLimits = ConnectionLimits()
    tls: Tls | None = None
    responses: KeptResponses = KeptResponses()
    files: KeptFiles = KeptFiles()
    log: RequestLogSettings = RequestLogSettings()

    def __repr__(self) -> str:
        """Shows all fields except keys."""
        hidden = {each.field for each in declared(HttpConfig) if each.setting.is_secret}
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in hidden)
        return f"HttpConfig({', '.join(shown)})"

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys or self.key_file)

    def with_tenants(self, source: str, keys: Sequence[str], has_origins: bool) -> HttpConfig:
        """Returns a copy with these keys, deduplicated. With keys, CORS is off unless origins are given. Raises
        ConfigError.

        `source`: where the keys come from, for errors.
        """
        check_keys(source, keys)
        tenant_of = _tenants(source, keys, self.tenants)
        if self.metrics_key:
            check_keys(called("metrics_key"), [self.metrics_key])
        if self.metrics_key in tenant_of:
            name = called("metrics_key")
            raise ConfigError(
                f"{name}: is also one of the API keys; give another key, which opens only /metrics and /load"
            )
        changes: dict[str, Any] = {"api_keys": tuple(tenant_of)}
        if self.tenants:
            changes["tenants"] = tuple(tenant_of.values())
        if not has_origins and (tenant_of or self.key_file):
            changes["allowed_origins"] = ()
        return msgspec.structs.replace(self, **changes)


def check_keys(source: str, keys: Sequence[str]) -> None:
    """Raises ConfigError, without showing the key, for a key that no client could send or that is easy to guess."""
    for at, key in enumerate(keys, 1):
        place = f"{source}, key {at} of {len(keys)}" if len(keys) > 1 else source
        if not key:
            raise ConfigError(f"{place}: empty; give a key, or leave it out to serve every client")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(f"{place}: keys may contain only printable ASCII characters, and no spaces")


def _tenants(source: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns key -> tenant's name; "" without names. Raises ConfigError, which never contains a key."""
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
                f"{setting} {name!r}: key {at} of {source} already belongs to {found[key]!r}; give each tenant its "
                "own key"
            )
    return found
