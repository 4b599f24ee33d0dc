"""The world of handoff_world.py, with models that have several groups of layers."""

from __future__ import annotations

from tests.support.handoff_engine import Kinds
from tests.support.handoff_world import World

MODELS: tuple[Kinds, ...] = (("all", "state"), ("all", "window"), ("all", "window", "state"), ("window", "state"))


class GroupsWorld(World):
    """Chooses one of the models by the seed."""

    def __init__(self, seed: int, num_requests: int = 12) -> None:
        self.kinds = MODELS[seed % len(MODELS)]
        super().__init__(seed, num_requests)
