"""Checks the folders from which a loaded model can take other weights. Does not choose the version."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from msgspec.structs import replace

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.replaced_weights import Stamp, check_replacement, stamp_of
from pd_cluster.errors import ModelError
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.wire import WeightVersion


def plan_from(plan: LoadPlan, path: str) -> LoadPlan:
    """Returns the plan with the weights of another folder and the same tokenizer and settings. Raises ModelError."""
    tokenizer = plan.checkpoint.tokenizer_path
    names = {"tokenizer": str(tokenizer), "tokenizer_revision": ""} if tokenizer is not None else {}
    config = replace(plan.config, model=path, revision="", **names)
    return dataclasses.replace(plan, config=config, checkpoint=Checkpoint.of(config))


def check_stamp(path: str, stamp: Stamp) -> None:
    """Raises ModelError if the weight files have changed since `stamp` was taken."""
    if stamp_of(Path(path)) != stamp:
        raise ModelError(f"{path}: the files have changed since they were checked; write each version to a new folder")


class VersionFiles:
    """Checks versions against the folder `base`. `refusal`: why this engine cannot change weights; "" if it can."""

    def __init__(self, base: Path, refusal: str = "") -> None:
        self._base, self._refusal = base, refusal
        self._checked: dict[str, Stamp] = {}  # the last checked folder and its stamp

    def check(self, version: WeightVersion) -> None:
        """Raises ModelError unless the folder holds exactly this version, for this model."""
        if self._refusal:
            raise ModelError(self._refusal)
        folder = Path(version.path)
        stamp = stamp_of(folder)
        if check_replacement(self._base, folder) != version.digest:
            raise ModelError(f"{folder}: the files differ from those on the scheduler's host; copy the folder again")
        self._checked = {version.path: stamp}

    def find(self, version: WeightVersion) -> None:
        """Checks a version's files once. Raises ModelError, also if they have changed since that check."""
        if version.path not in self._checked:
            self.check(version)
        check_stamp(version.path, self._checked[version.path])

    def stamp(self, version: WeightVersion) -> Stamp:
        """Returns the stamp of the files of a version that `find` has accepted."""
        return self._checked[version.path]
