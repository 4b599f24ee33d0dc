"""Keeps a port's TLS context, and reloads it when its files change. Knows nothing of connections."""

from __future__ import annotations

import logging
import os
import ssl

from pd_cluster.errors import ConfigError
from pd_cluster.settings.http_settings import Tls

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int] | None, ...]


class TlsFiles:
    """Loads the files. `context` is for new connections; open connections keep theirs. Raises ConfigError."""

    def __init__(self, config: Tls) -> None:
        self._config = config
        self._stamp = self._look()
        self.context = load(config)

    def refresh(self) -> None:
        """Reloads changed files. Unusable files are logged once, and the earlier context is kept."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.context = load(self._config)
        except ConfigError as error:
            log.error("TLS continues with the earlier files: %s", error)
        else:
            log.info("read the changed TLS files")

    def _look(self) -> Stamp:
        names = (self._config.certfile, self._config.keyfile, self._config.ca_certs)
        return tuple(_stamp_of(name) for name in names if name)


def _stamp_of(name: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def load(config: Tls) -> ssl.SSLContext:
    """Loads the context. Raises ConfigError that names the flag."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.certfile, config.keyfile or None, _refuse_password)
    except OSError as error:
        key = f", --ssl-keyfile {config.keyfile}" if config.keyfile else ", which must also contain the key"
        raise ConfigError(f"--ssl-certfile {config.certfile}{key}: {_why(error)}") from None
    if config.ca_certs:
        try:
            context.load_verify_locations(config.ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs {config.ca_certs}: {_why(error)}") from None
    context.verify_mode = ssl.VerifyMode(config.cert_reqs)
    return context


def _refuse_password() -> str:
    """Prevents OpenSSL from asking at the terminal, which would block."""
    raise ConfigError("--ssl-keyfile: the key is encrypted; decrypt it (openssl pkey -in KEY -out PLAIN, mode 0600)")


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not a PEM file of a certificate and its key"
    return error.strerror or type(error).__name__
