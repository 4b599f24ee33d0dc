"""The picker's certificate chain and its key, read again when the files change. Knows nothing of gRPC."""

from __future__ import annotations

from pathlib import Path

from pd_cluster.errors import ConfigError
from pd_cluster.net.tls_files import TlsFiles
from pd_cluster.settings.http_settings import Tls

Pair = tuple[bytes, bytes]
"""Private key and certificate chain, in PEM."""


class Certificate:
    """A certificate and key in files. Raises ConfigError if the files cannot be used."""

    def __init__(self, certfile: str, keyfile: str) -> None:
        self._certfile, self._keyfile = Path(certfile), Path(keyfile)
        self._files = TlsFiles(Tls(certfile, keyfile, "", 0))
        self._context = self._files.context
        self.pair = self._read()

    def renewed(self) -> Pair | None:
        """Returns the pair if it has changed since the last call. Unusable files are logged once."""
        self._files.refresh()
        if self._files.context is not self._context:
            self._context = self._files.context
            try:
                self.pair = self._read()
            except ConfigError:  # the files are being replaced right now
                return None
            return self.pair
        return None

    def _read(self) -> Pair:
        try:
            return self._keyfile.read_bytes(), self._certfile.read_bytes()
        except OSError as error:
            raise ConfigError(f"--ssl-certfile {self._certfile}, --ssl-keyfile {self._keyfile}: {error}") from None
