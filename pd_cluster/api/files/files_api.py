"""Assembles /v1/files and /v1/batches in a process that serves the public port."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial

from fastapi import APIRouter

from pd_cluster.api.admin.metrics_routes import batch_lines_metric
from pd_cluster.api.files.batch_routes import BATCHES, batch_routes
from pd_cluster.api.files.batch_service import BatchService
from pd_cluster.api.files.file_routes import FILES, file_routes
from pd_cluster.api.files.file_upload import FORM_NBYTES
from pd_cluster.api.files.line_admission import LineAdmission
from pd_cluster.api.files.line_answers import LineAnswers
from pd_cluster.api.middleware.api_key_auth import NAMED, owners_of
from pd_cluster.api.middleware.file_keys import FileKeys
from pd_cluster.api.routes.in_process_api import InProcessApi
from pd_cluster.errors import StorageFull
from pd_cluster.process_messages import AllStats
from pd_cluster.service.files.batch_store import BatchStore
from pd_cluster.service.files.batch_throttle import BatchThrottle
from pd_cluster.service.files.file_store import FileStore
from pd_cluster.service.text_service import TextService
from pd_cluster.settings.http_settings import HttpConfig

FILE_PATHS = (FILES, BATCHES)


class FilesApi:
    """`run`: runs batches until cancelled. `metric`: the lines of batches, for /metrics."""

    def __init__(self, service: TextService, is_ending: Callable[[], bool], file_keys: FileKeys | None) -> None:
        """`is_ending`: whether the server stops; then no further batch request begins. Raises ConfigError.

        Batches of owners without a valid key do not run.
        """
        http, router = service.settings.http, service.router
        files = FileStore(http.files)
        batches = BatchStore(files)
        throttle, self._batches = BatchThrottle(http.files.batch_concurrency), batches
        self._throttle, self._name = throttle, service.names.own[0]
        admission = LineAdmission(router, throttle, lambda: not is_ending())
        answers = LineAnswers(InProcessApi(service), admission, http, router.stats.tenants, is_ending)
        running = BatchService(batches, answers, partial(_is_known, {*owners_of(http)}, http.has_keys, file_keys))
        self.run = running.run
        self.routes: list[APIRouter] = [
            file_routes(files, http.allowed_origins),
            batch_routes(batches, running.look_now),
        ]

    def num_running(self) -> int:
        """Returns how many batch lines this process is answering."""
        return self._throttle.num_running

    async def metric(self, told: AllStats) -> bytes:
        """`told`: the figures of all API processes. If the disk fails, returns b"", so that others are still served."""
        try:
            counts = await self._batches.files.on_thread(self._batches.open_counts)
        except (StorageFull, sqlite3.Error):
            return b""
        return batch_lines_metric(self._name, counts, self.num_running() + told.others.num_batch_lines)


def _is_known(owners: set[str], has_keys: bool, file_keys: FileKeys | None, owner: str) -> bool:
    if not has_keys:
        return owner == ""
    is_in_file = file_keys is not None and owner.startswith(NAMED) and file_keys.has_tenant(owner.removeprefix(NAMED))
    return owner in owners or is_in_file


def most_nbytes_of(http: HttpConfig) -> dict[bytes, int]:
    """Returns path -> largest body, for paths with a larger limit than usual."""
    if not http.files.folder:
        return {}
    most_nbytes = (http.files.max_file_mib << 20) + FORM_NBYTES
    return {(root + FILES).encode(): most_nbytes for root in ("", http.root_path)}
