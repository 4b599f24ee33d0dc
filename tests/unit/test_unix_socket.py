"""The public Unix socket replaces a dead one, but neither a live one nor another kind of file."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pd_cluster.api.connections.http_server import bind_path
from pd_cluster.errors import ConfigError


def test_several_processes_share_one_queue(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listeners = bind_path(path, 3)
    assert len({each.fileno() for each in listeners}) == 3
    for each in listeners:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            accepted, _ = each.accept()
            accepted.close()
    with pytest.raises(ConfigError, match=f"--uds {path}: another process listens there"):
        bind_path(path, 1)
    for each in listeners:
        each.close()
    (again,) = bind_path(path, 1)  # the file still exists
    again.close()


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_path(str(path), 1)
    assert path.read_text() == "mine"
