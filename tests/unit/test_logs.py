"""`--log-config-file` takes Python's logging schema, and reports a faulty file in one line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.settings.log_setup import Logs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ('{"handlers": {"x": {"class": "no.such.Class"}}}', "x.*: .*No module named|x.*: .*Cannot resolve"),
        ('{"root": {"handlers": ["y"]}}', "Unable to configure root logger"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "logs.json"
    file.write_text(text)
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            Logs(file=str(file)).begin()
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    assert str(caught.value).startswith(f"--log-config-file {file}: ")
    assert "\n" not in str(caught.value)


def test_loggers_that_exist_stay(tmp_path: Path) -> None:
    file = tmp_path / "logs.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        Logs(file=str(file)).begin()
    file.write_text(
        '{"formatters": {"f": {"format": "OWN %(message)s"}}, "handlers": {"h": {"class": '
        '"logging.StreamHandler", "formatter": "f"}}, "root": {"handlers": ["h"], "level": "WARNING"}}'
    )
    code = (
        "import logging, sys; from pd_cluster.settings.log_setup import Logs; log = logging.getLogger('pd_cluster.x'); "
        "Logs('INFO', sys.argv[1]).begin(); log.warning('hot'); log.info('cold')"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60)
    assert ended.stderr.splitlines() == ["OWN hot"]


def test_lines_of_json() -> None:
    code = (
        "import logging; from pd_cluster.settings.log_setup import Logs; log = logging.getLogger('pd_cluster.x')\n"
        "Logs(format='json').begin(); log.info('%s \\n goes on', 'r-1', extra={'request_id': 'cmpl-1'})\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError as error: log.error('hot', exc_info=error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first, second = [json.loads(line) for line in ended.stderr.splitlines()]
    assert first.pop("time").endswith("Z")
    assert first.pop("pid") == second["pid"] > 0
    said = {"level": "INFO", "logger": "pd_cluster.x", "message": "r-1 \n goes on", "request_id": "cmpl-1"}
    assert first == said
    assert (second["level"], "request_id" in second) == ("ERROR", False)
    assert "ZeroDivisionError" in second["exception"]
