"""Sets up the log of a process of a server: by a level, or by a file of Python's logging configuration."""

from __future__ import annotations

import logging
import logging.config
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster.errors import ConfigError, called

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class Logs(msgspec.Struct, frozen=True):
    """`file`: JSON in the schema of `logging.config.dictConfig`, applied after the level; "" for none."""

    level: str = "INFO"
    file: str = ""

    def begin(self) -> None:
        """Sets up this process's log. Loggers that the file does not name stay. Raises ConfigError."""
        logging.basicConfig(level=self.level, format=FORMAT)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        if not self.file:
            return
        where = f"{called('log_config_file')} {self.file}"
        try:
            config = msgspec.json.decode(Path(self.file).read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: expected a JSON object: {error}") from None
        try:
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **config})
        except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
            why = error.__cause__ or error
            raise ConfigError(f"{where}: {error}{f': {why}' if why is not error else ''}") from None
