"""Sets up a server process's log: by a level and a format, or by a file of Python's logging configuration."""

from __future__ import annotations

import logging
import logging.config
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from pd_cluster.errors import ConfigError, called

FORMAT = "%(asctime)s %(levelname)s %(message)s"
LogFormat = Literal["text", "json"]
OF_A_REQUEST = ("request_id", "transfer_id")  # fields of log lines about one request, from the call's `extra`


class JsonFormatter(logging.Formatter):
    """Formats one JSON object a line: time (UTC), level, logger, message, pid, and the request's ids, if they are
    known.
    """

    def format(self, record: logging.LogRecord) -> str:
        ms = f"{record.msecs:03.0f}" if record.msecs < 999.5 else "999"
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{ms}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        line |= {name: getattr(record, name) for name in OF_A_REQUEST if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class Logs(msgspec.Struct, frozen=True):
    """`file`: JSON in the schema of `logging.config.dictConfig`, applied after the level; "" for none."""

    level: str = "INFO"
    file: str = ""
    format: LogFormat = "text"

    def begin(self) -> None:
        """Sets up this process's log. Loggers that the file does not name are kept. Raises ConfigError."""
        logging.basicConfig(level=self.level, format=FORMAT)
        if self.format == "json":
            for handler in logging.getLogger().handlers:
                handler.setFormatter(JsonFormatter())
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
