"""Loads the certificates that a client of a cluster trusts."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from pd_cluster.errors import PdClusterError


def trusted(env: Mapping[str, str]) -> ssl.SSLContext:
    """Returns a TLS context that trusts the system's certificates, or those of SSL_CERT_FILE. Raises PdClusterError."""
    file = env.get("SSL_CERT_FILE") or None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        raise PdClusterError(f"SSL_CERT_FILE {file}: cannot be used: {error}") from None


def reason_of(error: Exception) -> str:
    """Returns why a server did not answer, with a remedy if its certificate is not trusted."""
    reason = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return f"{reason}; SSL_CERT_FILE can name a file of certificates to trust"
    return reason
