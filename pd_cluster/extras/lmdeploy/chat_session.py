"""LMDeploy's `pipe.chat` and `pipe.session`: one conversation, turn by turn, without asyncio."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Protocol, Self

from pd_cluster.errors import Closed, RequestError
from pd_cluster.extras.lmdeploy.generation_config import GenerationConfig, GenOut, Response
from pd_cluster.extras.lmdeploy.session_generator import Done


class Engine(Protocol):
    """The engine that has the session."""

    def generate(self, messages: Any, session_id: int, **options: Any) -> AsyncGenerator[GenOut, None]: ...

    def steps(self, items: AsyncGenerator[GenOut, None]) -> Iterator[GenOut]: ...

    def end_session(self, session_id: int) -> Done: ...


class ChatSession:
    """A conversation. `response`: the last answer. `history`: (prompt, text of the answer) of each turn."""

    def __init__(self, engine: Engine, session_id: int, gen_config: GenerationConfig | None = None) -> None:
        self._engine: Engine | None = engine
        self.session_id = session_id
        self.gen_config = gen_config
        self.response: Response | None = None
        self.history: list[tuple[Any, str]] = []
        self._steps: Iterator[Response] | None = None
        weakref.finalize(self, engine.end_session, session_id)  # garbage collection removes the history

    def __call__(
        self, prompt: Any, gen_config: GenerationConfig | None = None, stream_response: bool = True, **options: Any
    ) -> Iterator[Response] | Response | None:
        """Runs a turn. Returns its parts or, without `stream_response`, the whole answer. Raises RequestError."""
        self.say(prompt, gen_config, options)
        if stream_response:
            return iter(self)
        for _ in self:
            pass
        return self.response

    def say(self, prompt: Any, gen_config: GenerationConfig | None, options: dict[str, Any]) -> None:
        """Begins a turn; iterating over the session yields its parts. Raises RequestError and Closed."""
        if self._engine is None:
            raise Closed(f"session {self.session_id} is closed; make a new one")
        if self._steps is not None:
            raise RequestError(f"session {self.session_id}: its current answer has not been read to the end")
        self.response = None
        self._steps = self._turn(self._engine, prompt, gen_config or self.gen_config, options)

    def _turn(
        self, engine: Engine, prompt: Any, gen_config: GenerationConfig | None, options: dict[str, Any]
    ) -> Iterator[Response]:
        outs = engine.generate(
            prompt,
            self.session_id,
            gen_config=gen_config,
            sequence_start=not self.history,
            sequence_end=False,
            **options,
        )
        parts: list[GenOut] = []
        try:
            with contextlib.closing(engine.steps(outs)) as steps:  # type: ignore[type-var]
                for out in steps:
                    parts.append(out)
                    yield self._response(parts[-1:])
        finally:
            self._steps = None
            if parts:
                self.response = self._response(parts)
                self.history.append((prompt, self.response.text))

    def _response(self, parts: list[GenOut]) -> Response:
        last = parts[-1]
        has_logprobs = any(part.logprobs is not None for part in parts)
        return Response(
            text="".join(part.response for part in parts),
            generate_token_len=last.generate_token_len,
            input_token_len=last.input_token_len,
            session_id=self.session_id,
            finish_reason=last.finish_reason,
            token_ids=[token_id for part in parts for token_id in part.token_ids],
            logprobs=[each for part in parts for each in part.logprobs or []] if has_logprobs else None,
            error=last.error,
        )

    def __iter__(self) -> Iterator[Response]:
        """Yields the parts of the current answer."""
        return iter(()) if self._steps is None else self._steps

    @property
    def generator(self) -> Iterator[Response]:
        """The parts of the current answer, under LMDeploy's name."""
        return iter(self)

    def close(self) -> None:
        """Ends the current answer and removes the conversation; further calls do nothing."""
        if self._engine is not None:
            self._engine.end_session(self.session_id)
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "".join(f"USER:\n{prompt}\nASSISTANT:\n{answer}\n" for prompt, answer in self.history)
