"""Builds the part of an engine that replaces its weights."""

from __future__ import annotations

import msgspec

from pd_cluster import wire
from pd_cluster.engine.lifecycle.engine_weights import WeightSource
from pd_cluster.engine.ranks.lead_runner import LeadRunner
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.model.runner.weight_versions import CopySource, VersionFiles


def weights_of(
    core: EngineCore, runner: ModelRunner, all_ranks: LeadRunner | ModelRunner, copies: CopySource | None = None
) -> WeightSource:
    """Returns the functions that change the weights of an engine outside of a unit.

    `all_ranks`: `runner`, with its followers if any. `copies`: the source of versions whose files are not on this host.
    """
    files = VersionFiles(runner.model_folder, copies)

    def load(version: wire.WeightVersion) -> None:
        folder, stamp = files.found(version)
        all_ranks.change_weights(str(folder), stamp)
        runner.numerics = msgspec.structs.replace(runner.numerics, weights=version.digest)
        core.scheduler.change_numerics(runner.numerics)
        files.loaded(version)

    return WeightSource(files.check, files.is_found, load)
