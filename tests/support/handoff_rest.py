"""The world of handoff_world.py, with a link that closes while it is idle and reopens for its next transfer."""

from __future__ import annotations

from pd_cluster import wire
from tests.support.handoff_world import World


class RestingWorld(World):
    def __init__(self, seed: int, num_requests: int = 12) -> None:
        self.is_resting = self.is_awaited = False
        self.num_rests = self.num_wakes = self.num_lost = 0
        super().__init__(seed, num_requests)
        num_trouble = len(self.troubles)
        quiet = [self._rest, self._wake, self._wake]
        self.events[-num_trouble:-num_trouble] = quiet
        step = self.weights[self.num_quiet - 1] / self.num_quiet
        before, after = self.weights[: self.num_quiet], self.weights[self.num_quiet :]
        added = [before[-1] + step * (at + 1) for at in range(len(quiet))]
        self.weights = before + added + [each + step * len(quiet) for each in after]
        self.num_quiet += len(quiet)

    def start_p(self) -> None:
        super().start_p()
        self.is_resting = self.is_awaited = False

    def connect(self) -> None:
        if not self.is_resting:
            super().connect()

    def awaken(self, peer: str) -> bool:
        self.is_awaited = self.is_awaited or self.is_resting
        return self.is_resting

    def _rest(self) -> None:
        """P closes an idle link between two steps; D learns of it after all of P's earlier messages."""
        conn = self.p_link
        if (
            self.p.plan is None
            and conn is not None
            and conn == self.p_conn == self.d_conn
            and not self.exports.uses(conn)
        ):
            self.p_link, self.is_resting = None, True
            self.num_rests += 1
            self.to_d.append((conn, wire.LinkRest(conn)))

    def _d_reads_inbox(self) -> None:
        if self.d_inbox and isinstance(self.d_inbox[0], tuple) and isinstance(self.d_inbox[0][1], wire.LinkRest):
            conn, _ = self.d_inbox.popleft()  # type: ignore[misc]
            if conn == self.d_conn:
                # P's engine may release a transfer (deadline or abort) before its mailbox has sent the confirmation.
                left = {transfer_id for transfer_id, of in self.d_side.landing.items() if of == conn}
                assert left <= self.taken, "a link is closed under a transfer"
                self._d_loses_link("it is at rest")
                if conn == self.p_conn:
                    self.p_conn = None  # P closes the connection after D's answer
        else:
            super()._d_reads_inbox()

    def _wake(self) -> None:
        """Tries to reopen a closed link that a transfer awaits; P's engine learns the outcome between two steps."""
        if self.p_conn is None and self.d_conn is not None and self.is_resting:
            self._d_loses_link("cut")
        if not (self.is_resting and self.is_awaited and self.p_conn is None and self.d_conn is None):
            return
        if self.p.plan is not None or self.p_inbox:
            return
        self.is_resting = self.is_awaited = False
        if self.trouble and self.rng.random() < 0.4:
            self.num_lost += 1
            self.num_troubles += 1
            self.exports.link_lost("decode", "it did not open")
        else:
            self.num_wakes += 1
            super().connect()
            assert self.p_link is not None
            self.exports.link_up("decode", self.p_link)
