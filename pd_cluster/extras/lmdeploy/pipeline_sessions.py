"""Keeps conversations over several calls: their turns, token counts, and current answers.

The prefix cache keeps the KV cache of a session; this module keeps only its texts and tokens. Knows nothing of engines.
"""

from __future__ import annotations

import reprlib
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count

from pd_cluster.errors import RequestError
from pd_cluster.extras.lmdeploy.pipeline_prompts import Message, Prompt

FIRST_OWN_ID = 1 << 32  # the first id for sessions without an id from their callers


@dataclass(slots=True)
class Turn:
    """A question and its answer. `token_ids`: all tokens of the session after this turn."""

    messages: list[Message]
    token_ids: list[int]


@dataclass(slots=True)
class Session:
    """A session; its first prompt decides whether it consists of plain texts or of conversations.

    `turn`: a future that exists while an answer is being read, and is done when the answer ends. `work`: the task that
    makes the answer. `before`: the session's state before this turn.
    """

    session_id: int
    is_plain: bool = False
    turns: list[Turn] = field(default_factory=list)
    turn: Future[None] | None = None
    work: Future[None] | None = None
    is_stopped: bool = False
    before: Session | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.turns[-1].token_ids if self.turns else []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def works(self, work: Future[None]) -> None:
        self.work = work
        if self.is_stopped:
            work.cancel()

    def stop(self) -> None:
        """Stops the current answer, if there is one."""
        self.is_stopped = self.turn is not None
        if self.work is not None:
            self.work.cancel()

    def rewind(self, step: int) -> None:
        """Goes back to the turn that ended with that many tokens. Raises RequestError."""
        ends = [0, *(len(turn.token_ids) for turn in self.turns)]
        if step not in ends:
            raise RequestError(
                f"step: {step} is not the end of a turn in session {self.session_id}; turns end at "
                f"{', '.join(map(str, ends))} tokens",
                param="step",
            )
        del self.turns[ends.index(step) :]

    def with_history(self, prompt: Prompt) -> Prompt:
        """Puts the history before a prompt, except a plain text, whose history is tokens. Raises RequestError."""
        is_plain = isinstance(prompt, str) or isinstance(prompt[0], int)
        if self.turns and is_plain != self.is_plain:
            raise RequestError(
                f"do_preprocess: session {self.session_id} began {'without' if self.is_plain else 'with'} a chat "
                f"template; keep do_preprocess as it is until sequence_end",
                param="do_preprocess",
            )
        self.is_plain = is_plain
        if is_plain:
            return prompt
        return [message for turn in self.turns for message in turn.messages] + _messages(prompt)

    def add(self, prompt: Prompt, token_ids: list[int], answer: str) -> None:
        """Records a turn. `token_ids`: the tokens of the whole prompt and the answer."""
        said = [] if self.is_plain else [*_messages(prompt), {"role": "assistant", "content": answer}]
        self.turns.append(Turn(said, token_ids))


class Sessions:
    def __init__(self) -> None:
        self._known: dict[int, Session] = {}
        self._next_ids = count(FIRST_OWN_ID)

    def new_id(self) -> int:
        """Returns an id that no session has."""
        return next(new for new in self._next_ids if new not in self._known)

    def begin(self, session_id: int, sequence_start: bool, step: int) -> Session:
        """Returns the session of the next turn. Raises RequestError, without any change."""
        if isinstance(session_id, bool) or not isinstance(session_id, int):
            raise RequestError(f"session_id: {reprlib.repr(session_id)} must be a whole number", param="session_id")
        session = self._known.get(session_id)
        if session is not None and session.turn is not None:
            raise RequestError(
                f"session_id: session {session_id} is answering; wait for its end, or stop_session({session_id})",
                param="session_id",
            )
        if sequence_start:
            new = Session(session_id, before=session)
        elif session is not None:
            new = replace(session, turns=list(session.turns), before=session)
        else:
            raise RequestError(
                f"session_id: there is no session {session_id}; begin it with sequence_start=True", param="session_id"
            )
        if step:
            new.rewind(step)
        new.turn = Future()
        self._known[session_id] = new
        return new

    def refuse(self, session: Session) -> None:
        """Undoes `begin` for a turn that was refused."""
        if self._known.get(session.session_id) is not session:
            return
        if session.before is not None:
            self._known[session.session_id] = session.before
        else:
            del self._known[session.session_id]

    def finish(self, session: Session, is_last: bool) -> None:
        """Ends the session's turn."""
        turn, session.turn, session.work, session.is_stopped = session.turn, None, None, False
        session.before = None
        if is_last and self._known.get(session.session_id) is session:
            del self._known[session.session_id]
        if turn is not None:
            turn.set_result(None)

    def stop(self, session_id: int) -> None:
        """Stops the current answer, if there is one."""
        if (session := self._known.get(session_id)) is not None:
            session.stop()

    def end(self, session_id: int) -> None:
        """Stops the session's answer, then removes the session."""
        self.stop(session_id)
        self._known.pop(session_id, None)

    def turn(self, session_id: int) -> Future[None] | None:
        """Returns a future that is done when the current answer has been read."""
        session = self._known.get(session_id)
        return session.turn if session is not None else None


def _messages(prompt: Prompt) -> list[Message]:
    assert not isinstance(prompt, str)
    return [message for message in prompt if isinstance(message, dict)]
