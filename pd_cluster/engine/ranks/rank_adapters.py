"""Adapters of an instance with several ranks: rank 0 makes each rank load its share, and waits for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.checkpoints.prompt_adapter_folder import AdapterFolder, read_adapter
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.stages.adapter_loader import load_from
from pd_cluster.errors import ModelError
from pd_cluster.model.runner.model_adapters import ModelAdapters
from pd_cluster.model.runner.model_runner import ModelRunner

ANSWER_TIMEOUT_S = 300.0


class LeadAdapters:
    """Rank 0's side. `tell` sends a message to all `num_followers` followers."""

    def __init__(
        self,
        held: ModelAdapters,
        num_followers: int,
        tell: Callable[[to.RankMessage], None],
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._held = held
        self._num_followers = num_followers
        self._tell = tell
        self._timeout_s = timeout_s
        self._answers: dict[str, dict[int, str]] = {}  # digest -> rank -> problem, while loading
        self._changed = threading.Condition()

    @property
    def variants(self) -> Mapping[str, int]:
        return self._held.variants

    def hear(self, message: to.LoadedAdapter) -> None:
        """Records a follower's answer. Called on the thread of the follower's channel."""
        with self._changed:
            if message.digest in self._answers:
                self._answers[message.digest][message.rank] = message.problem
                self._changed.notify_all()

    def load_adapter(self, folder: AdapterFolder) -> None:
        """Loads an adapter on all ranks, on a thread that computes no steps. Raises ModelError, ConfigError."""
        if folder.digest in self.variants:
            return
        max_rank = folder.max_rank if isinstance(folder, LoraFolder) else 0
        with self._changed:
            self._answers[folder.digest] = {}
        slot = self._held.next_slot(folder.digest)
        self._tell(to.LoadAdapter(folder.digest, str(folder.path), slot, max_rank))
        try:
            self._await(folder.digest)
            self._held.load_adapter(folder, slot)  # last, because requests may then use the adapter
        except Exception:
            self._tell(to.DropAdapter(folder.digest))
            raise
        finally:
            with self._changed:
                del self._answers[folder.digest]

    def drop_adapter(self, digest: str) -> None:
        self._held.drop_adapter(digest)
        self._tell(to.DropAdapter(digest))

    def _await(self, digest: str) -> None:
        """Waits for every follower's answer. Raises ModelError."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._changed:
            while len(self._answers[digest]) < self._num_followers:
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise ModelError(f"adapter {digest[:12]}: a rank did not load it within {self._timeout_s:g} s")
            for rank, problem in sorted(self._answers[digest].items()):
                if problem:
                    raise ModelError(f"rank {rank}: {problem}")


def load_share(runner: ModelRunner, message: to.LoadAdapter, answer: Callable[[to.LoadedAdapter], None]) -> None:
    """Loads a follower's share on a separate thread."""

    def load() -> None:
        def put(folder: AdapterFolder) -> None:
            runner.held.load_adapter(folder, message.slot)

        problem = load_from(message.path, message.digest, partial(read_adapter, max_rank=message.max_rank), put)
        answer(to.LoadedAdapter(runner.group.rank, message.digest, problem))

    threading.Thread(target=load, name="adapters", daemon=True).start()
