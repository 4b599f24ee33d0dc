"""Access to the dashboard: a one-time code is exchanged for a session. The clock is a parameter; knows nothing of HTTP.

A code is made for a holder of the admin token, travels in the fragment of a link (which browsers never send), and works
once, within CODE_LIFE_S. The code begins a session: a secret for a cookie, and another for the header of commands,
which a foreign page cannot know. Only digests of cookies are kept. A session may depend on an API key, and then ends
with the key.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

CODE_LIFE_S = 60.0
SESSION_LIFE_S = 12 * 3600.0
MAX_CODES = 16
MAX_SESSIONS = 64
MAX_OF_OWNER = 4
NUM_CODE_BYTES, NUM_SECRET_BYTES = 16, 32
# Rate and burst of a public session's queries: enough for two open pages, or briefly for four.
LOOKS_PER_S, MOST_LOOKS = 4.0, 8.0


class ViewRate:
    """A token bucket for the queries of one session."""

    def __init__(self, now_s: float) -> None:
        self._left, self._at_s = MOST_LOOKS, now_s

    def take(self, now_s: float) -> bool:
        """Takes a token; returns False if there is none."""
        self._left = min(MOST_LOOKS, self._left + (now_s - self._at_s) * LOOKS_PER_S)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, slots=True)
class Session:
    """`command_token`: required in the header of a command. `is_valid`: whether its credentials are still valid.

    `owner`: the digest of the API key that began it; b"" for a session that a link began.
    """

    command_token: str
    ends_s: float
    view_rate: ViewRate
    is_valid: Callable[[], bool] = lambda: True
    owner: bytes = b""


class Sessions:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: dict[str, float] = {}  # code -> the time when it expires, oldest first
        self._sessions: dict[str, Session] = {}  # the cookie's digest -> session, oldest first

    def new_code(self) -> str:
        """Returns a code; beyond MAX_CODES the oldest code stops working."""
        self._forget()
        while len(self._codes) >= MAX_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(NUM_CODE_BYTES)
        self._codes[_digest(code)] = self._clock() + CODE_LIFE_S
        return code

    def exchange(self, code: str) -> tuple[str, Session] | None:
        """Uses a code up; returns a cookie's value and its session; None for an invalid code."""
        self._forget()
        return self.begin() if self._codes.pop(_digest(code), None) is not None else None

    def begin(self, is_valid: Callable[[], bool] = lambda: True, owner: bytes = b"") -> tuple[str, Session]:
        """Begins a session that ends when `is_valid` returns False; returns a cookie's value and the session.

        Beyond MAX_OF_OWNER, an owner's oldest session ends, so that no key can end the sessions of others.
        """
        self._forget()
        own = [digest for digest, each in self._sessions.items() if owner and each.owner == owner]
        if len(own) >= MAX_OF_OWNER:
            del self._sessions[own[0]]
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(NUM_SECRET_BYTES)
        now_s = self._clock()
        command_token = secrets.token_urlsafe(NUM_SECRET_BYTES)
        session = Session(command_token, now_s + SESSION_LIFE_S, ViewRate(now_s), is_valid, owner)
        self._sessions[_digest(cookie)] = session
        return cookie, session

    def find(self, cookie: str) -> Session | None:
        self._forget()
        return self._sessions.get(_digest(cookie))

    def may_look(self, cookie: str) -> bool:
        """Counts a query of this session; returns False if there were too many recently."""
        session = self.find(cookie)
        return session is None or session.view_rate.take(self._clock())

    def end(self, cookie: str) -> None:
        self._sessions.pop(_digest(cookie), None)

    def _forget(self) -> None:
        now_s = self._clock()
        self._codes = {code: ends_s for code, ends_s in self._codes.items() if ends_s > now_s}
        self._sessions = {
            digest: each for digest, each in self._sessions.items() if each.ends_s > now_s and each.is_valid()
        }


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
