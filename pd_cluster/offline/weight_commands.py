"""The commands of `LLM` that replace its weights, with vLLM's names and dicts. Callers may give any folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pd_cluster.cluster.weights.update_bodies import (
    FinishWeightUpdate,
    InitTransfer,
    RenameWeights,
    StartWeightUpdate,
    UpdateWeights,
)
from pd_cluster.cluster.weights.weight_updates import DEFAULT_NAME, WeightRules
from pd_cluster.errors import RequestError
from pd_cluster.offline.local_engine import LocalEngine
from pd_cluster.offline.split_cluster import SplitCluster

B = TypeVar("B", FinishWeightUpdate, InitTransfer, RenameWeights, StartWeightUpdate, UpdateWeights)


class WeightCommands:
    """`run`: returns the result of work on the event loop. `base`: the model's folder."""

    def __init__(
        self, run: Callable[[Coroutine[Any, Any, Any]], Any], backend: LocalEngine | SplitCluster, base: Path
    ) -> None:
        self._run = run
        self._folder = Path(tempfile.mkdtemp(prefix="pd-cluster-weights-"))  # mode 0700
        rules = WeightRules(Path("/"), base, hosts=None, received=self._folder)
        self._updates = backend.weight_updates(rules)

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        self._run(self._updates.join(_read(request, InitTransfer).trainer()))

    def shutdown_weight_transfer_engine(self) -> None:
        self._run(self._updates.leave())

    def start_weight_update(self, mode: str) -> None:
        self._run(self._updates.start(_read({"mode": mode}, StartWeightUpdate).mode))

    def update_weights(self, request: Mapping[str, Any]) -> None:
        info = _read(request, UpdateWeights).update_info
        self._run(self._updates.take(info.folder, info.tensors()))

    def finish_weight_update(self, weight_version: str | None) -> str:
        name = _read({"weight_version": weight_version}, FinishWeightUpdate).weight_version
        return str(self._run(self._updates.finish(name or "")).name)

    def abort_weight_update(self) -> None:
        self._run(self._updates.abort())

    def update_weight_version(self, new_version: str) -> None:
        self._run(self._updates.rename(_read({"new_version": new_version}, RenameWeights).new_version))

    def get_weight_version(self) -> str:
        return self._updates.current.name or DEFAULT_NAME

    async def close(self) -> None:
        await self._updates.leave()
        shutil.rmtree(self._folder, ignore_errors=True)


def _read(request: Mapping[str, Any], kind: type[B]) -> B:
    """Raises RequestError."""
    try:
        return msgspec.convert(request, kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param="request") from None
