"""Checks the folders from which a loaded model can take other weights. Does not choose the version."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.replaced_weights import Stamp, check_replacement, stamp_of
from pd_cluster.errors import ModelError
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.weights.finite_files import check_finite_files
from pd_cluster.wire import WeightVersion


def plan_from(plan: LoadPlan, path: str) -> LoadPlan:
    """Returns the plan with the weights of another folder, which may lack all other files. Raises ModelError."""
    tokenizer = plan.checkpoint.tokenizer_path
    names = {"tokenizer": str(tokenizer), "tokenizer_revision": ""} if tokenizer is not None else {}
    config = replace(plan.config, model=path, revision="", **names)
    return dataclasses.replace(plan, config=config, checkpoint=Checkpoint.of(config, plan.checkpoint))


def check_stamp(path: str, stamp: Stamp) -> None:
    """Raises ModelError if the weight files have changed since `stamp` was taken."""
    if stamp_of(Path(path)) != stamp:
        raise ModelError(f"{path}: the files have changed since they were checked; write each version to a new folder")


class VersionCopies(Protocol):
    """Copies of versions by digest, which this process keeps on its host."""

    def of(self, digest: str) -> Path | None: ...
    def drop(self, digest: str) -> None: ...
    def keep_only(self, *digests: str) -> None: ...


class CopySource(Protocol):
    """Gets copies of versions from other processes."""

    @property
    def copies(self) -> VersionCopies: ...

    def fetch(self, version: WeightVersion, check: Callable[[Path], None]) -> None:
        """Gets a copy for which `check` raises no error. Raises ModelError."""


class VersionFiles:
    """Checks versions against the folder `base`. Any thread may call its methods.

    `source` None: versions are read only from their own folders.
    """

    def __init__(self, base: Path, source: CopySource | None = None) -> None:
        self._base, self._source = base, source
        self._one_at_a_time = threading.Lock()
        self._checked: dict[str, tuple[Path, Stamp]] = {}  # the two checked last, by digest: one may be loading
        self._held = ""  # the digest of the loaded version

    def check(self, version: WeightVersion) -> None:
        """Raises ModelError unless a folder holds exactly this version, for this model; gets a copy if need be."""
        with self._one_at_a_time:
            try:
                self._check(version, Path(version.path))
            except (ModelError, OSError) as error:
                if self._source is None:
                    raise
                self._check_copy(self._source, version, error)

    def _check_copy(self, source: CopySource, version: WeightVersion, why: ModelError | OSError) -> None:
        """Checks a copy instead, which is fetched if need be. `why`: the error of the version's own folder."""
        source.copies.keep_only(self._held, version.digest, *self._checked)
        if (folder := source.copies.of(version.digest)) is not None:
            with contextlib.suppress(ModelError, OSError):
                self._check(version, folder)
                return
            source.copies.drop(version.digest)
        try:
            source.fetch(version, partial(self._check, version))
        except ModelError as error:
            missing = why.text if isinstance(why, ModelError) else f"{version.path}: {why.strerror}"
            raise ModelError(f"{missing}; no other process sends it: {error.text}") from error

    def _check(self, version: WeightVersion, folder: Path) -> None:
        stamp = stamp_of(folder)
        if check_replacement(self._base, folder) != version.digest:
            raise ModelError(f"{folder}: its weights differ from those on the scheduler's host; copy the folder again")
        check_finite_files(self._base, folder)  # otherwise every instance would end as it loads them
        others = [each for each in self._checked.items() if each[0] != version.digest]
        self._checked = {**dict(others[-1:]), version.digest: (folder, stamp)}

    def is_found(self, version: WeightVersion) -> bool:
        """Whether a version's files are still those that were checked."""
        folder, stamp = self._checked.get(version.digest, (None, ()))
        try:
            return folder is not None and stamp_of(folder) == stamp
        except ModelError:
            return False

    def found(self, version: WeightVersion) -> tuple[Path, Stamp]:
        """Returns the folder of a version that was found, and the stamp of its files."""
        return self._checked[version.digest]

    def loaded(self, version: WeightVersion) -> None:
        """Forgets the copies of other versions, except of one that was checked later."""
        self._held = version.digest
        if self._source is not None:
            checked = [*self._checked]
            later = checked[checked.index(version.digest) :] if version.digest in checked else checked
            self._source.copies.keep_only(version.digest, *later)
