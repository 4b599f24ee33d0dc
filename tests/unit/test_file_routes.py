"""File routes without a cluster: a full disk, owners without keys, and servers that cannot store files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pd_cluster.api.middleware.api_key_auth import owners_of
from pd_cluster.commands import serve_scheduler
from pd_cluster.errors import ConfigError
from pd_cluster.settings.file_settings import KeptFiles
from pd_cluster.settings.http_settings import HttpConfig
from tests.support.full_disks import full_disk
from tests.support.public_port import ask, make_app

pytest.importorskip("python_multipart")


def upload(app: Any, data: bytes, **headers: str) -> Any:
    form = httpx.Request("POST", "http://x/", files={"file": ("a", data)}, data={"purpose": "batch"})
    told = [("content-type", form.headers["content-type"]), *headers.items()]
    return ask(app, "POST", "/v1/files", told, form.read())


def said(answer: Any) -> Any:
    return msgspec.json.decode(b"".join(answer.parts))


def test_a_full_disk_is_a_507(tmp_path: Path) -> None:
    app, _ = make_app(tmp_path, HttpConfig(files=KeptFiles(str(tmp_path / "files"))))
    with full_disk(100_000):
        answer = upload(app, b"x" * 200_000)
    assert answer.status == 507
    assert said(answer)["error"]["code"] == "storage_full"
    assert [*(tmp_path / "files" / "content").iterdir()] == []
    assert said(upload(app, b"x" * 200_000))["bytes"] == 200_000


def test_pages_of_other_sites_upload_nothing(tmp_path: Path) -> None:
    http = HttpConfig(files=KeptFiles(str(tmp_path / "files")), allowed_origins=("https://a.example",))
    app, _ = make_app(tmp_path, http)
    assert upload(app, b"x", origin="https://evil.example", host="localhost:80").status == 403
    assert upload(app, b"x", origin="http://localhost:80", host="localhost:80").status == 200
    assert upload(app, b"x", origin="https://a.example", host="localhost:80").status == 200


def test_batches_run_for_owners_with_a_key(tmp_path: Path) -> None:
    from pd_cluster.api.files.files_api import _is_known

    named = HttpConfig(api_keys=("k",), tenants=("one",))
    assert owners_of(named) == ["name:one"]
    (unnamed,) = owners_of(HttpConfig(api_keys=("k",)))
    assert re.fullmatch(r"key:[0-9a-f]{64}", unnamed)
    assert _is_known({"name:one"}, True, None, "name:one")
    assert not _is_known({"name:one"}, True, None, "")
    assert not _is_known({"name:one"}, True, None, "name:two")
    assert _is_known(set(), False, None, "")
    assert not _is_known(set(), False, None, "name:one")


def test_a_server_that_cannot_keep_files_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KeptFiles(str(tmp_path / "files"))
    with pytest.raises(ConfigError, match="USE_OPENAI=0"):
        serve_scheduler.check_files(files, openai=False)
    serve_scheduler.check_files(files, openai=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pd-cluster\[files\]'"):
        serve_scheduler.check_files(files, openai=True)
