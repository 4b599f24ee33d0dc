"""Self-signed certificates, made by the openssl command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pd_cluster.settings.http_settings import Tls


@dataclass(frozen=True, slots=True)
class Certificate:
    certfile: Path
    keyfile: Path

    def tls(self, ca: Certificate | None = None, cert_reqs: int = 0) -> Tls:
        ca_certs = str(ca.certfile) if ca is not None else ""
        return Tls(str(self.certfile), str(self.keyfile), ca_certs, cert_reqs)

    def trusted(self, own: Certificate | None = None) -> ssl.SSLContext:
        """Returns a client's context that trusts only this certificate and presents `own` if given."""
        context = ssl.create_default_context(cafile=str(self.certfile))
        if own is not None:
            context.load_cert_chain(own.certfile, own.keyfile)
        return context

    def becomes(self, other: Certificate) -> None:
        """Replaces this certificate's files by another's, one after the other, as a renewal does."""
        for old, new in ((self.keyfile, other.keyfile), (self.certfile, other.certfile)):
            copy = old.with_suffix(".new")
            shutil.copy(new, copy)
            copy.replace(old)


def make_certificate(folder: Path, name: str, of: str = "IP:127.0.0.1,DNS:localhost") -> Certificate:
    """Makes a certificate for 127.0.0.1 and localhost, or for the names in `of`."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command")
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-out", str(made.certfile), "-keyout", str(made.keyfile)]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={of}"]
    subprocess.run(["openssl", "req", "-x509", *curve, *files, *names], check=True, capture_output=True, timeout=60)
    return made
