"""LMDeploy's AsyncEngine: answers batches of prompts, and sessions, in this process or in worker processes.

Knows nothing of an engine's configuration (pipeline.py) or the generation of answers (pipeline_answers.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from typing import Any, Literal, Self

from pd_cluster.errors import RequestError
from pd_cluster.extras.lmdeploy.call_options import Call, ReplacedKeywords, distinct, options_of
from pd_cluster.extras.lmdeploy.chat_session import ChatSession
from pd_cluster.extras.lmdeploy.engine_configs import BackendConfig
from pd_cluster.extras.lmdeploy.generation_config import GenerationConfig, GenOut, Response, request_of
from pd_cluster.extras.lmdeploy.pipeline_answers import Job, answers, begin, joined, whole_answers
from pd_cluster.extras.lmdeploy.pipeline_prompts import Prompt, as_prompt, prompt_of, prompts_of
from pd_cluster.extras.lmdeploy.pipeline_sessions import Session, Sessions
from pd_cluster.extras.lmdeploy.pipeline_setup import Setup
from pd_cluster.extras.lmdeploy.prompt_templates import ChatTemplateConfig, PromptStyle, way_of
from pd_cluster.extras.lmdeploy.session_generator import Done, SessionGenerator
from pd_cluster.offline.iterator_bridge import Stopped, bridged
from pd_cluster.offline.progress_bar import Progress
from pd_cluster.service.schema.completion_protocol import CompletionRequest

GenConfigs = GenerationConfig | list[GenerationConfig] | None  # one for all prompts, or one for each


class AsyncEngine:
    """Ready when constructed. May be called from any thread, and `generate` from any event loop.

    `prefill` and `decode` are numbers of worker processes that do the work; without them, this process does it or, if
    `tp` or `dp` is above 1, `dp` worker processes of each kind.
    """

    def __init__(
        self,
        model_path: str,
        model_name: str | None = None,
        backend: Literal["turbomind", "pytorch"] = "turbomind",
        backend_config: BackendConfig | None = None,
        chat_template_config: ChatTemplateConfig | None = None,
        instance_num: int = 32,
        tp: int = 1,
        **kwargs: Any,
    ) -> None:
        """Raises ConfigError, ModelError and the like."""
        setup = Setup(model_path, model_name, backend, backend_config, chat_template_config, instance_num, tp)
        ready = setup.open(kwargs)
        self.backend = backend
        self.backend_config = ready.backend_config
        self.instance_num = ready.num_at_once
        self.offline, self._way = ready.offline, ready.way
        self._sessions = Sessions()

    @property
    def session_len(self) -> int:
        return self.offline.service.max_model_len

    @property
    def tokenizer(self) -> Any:
        return self.offline.service.tokenizer

    def close(self) -> None:
        """Ends the engine and its answers; further calls do nothing."""
        self.offline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- batches

    def __call__(
        self,
        prompts: Any,
        gen_config: GenConfigs = None,
        chat_template_config: ChatTemplateConfig | bool | None = None,
        request_output_len: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        repetition_penalty: float | None = None,
        ignore_eos: bool | None = None,
        **options: Any,
    ) -> list[Response] | Response:
        """Returns a response for each prompt, in order. `options`: further fields of `Call`.

        In LMDeploy's first version the third argument is the chat template's configuration, in later versions the
        switch `do_preprocess`; both are accepted. Raises RequestError before any work.
        """
        old = ReplacedKeywords(request_output_len, top_k, top_p, temperature, repetition_penalty, ignore_eos)
        return self._infer(prompts, gen_config, options_of(chat_template_config, old, options))

    batch_infer = __call__

    def stream_infer(
        self,
        prompts: Any,
        gen_config: GenConfigs = None,
        chat_template_config: ChatTemplateConfig | bool | None = None,
        request_output_len: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        repetition_penalty: float | None = None,
        ignore_eos: bool | None = None,
        **options: Any,
    ) -> Iterator[Response]:
        """Yields each prompt's new text as it comes, with its `index`. Leaving the iteration ends the work."""
        old = ReplacedKeywords(request_output_len, top_k, top_p, temperature, repetition_penalty, ignore_eos)
        jobs, _, call = self._jobs(prompts, gen_config, options_of(chat_template_config, old, options))
        return self._streamed(jobs, call)

    def _infer(self, prompts: Any, gen_config: Any, options: dict[str, Any]) -> list[Response] | Response:
        jobs, is_one, call = self._jobs(prompts, gen_config, options)
        with Progress(len(jobs), call.use_tqdm) as progress:
            work = whole_answers(
                self.offline.service,
                jobs,
                self.instance_num,
                lambda last: progress.add(last.input_token_len, last.generate_token_len),
            )
            found = self.offline.run(work)
        return found[0] if is_one else found

    def _streamed(self, jobs: list[Job], call: Call) -> Iterator[Response]:
        with Progress(len(jobs), call.use_tqdm) as progress:
            items = answers(self.offline.service, jobs, self.instance_num)
            with contextlib.closing(self.offline.iterate(items)) as responses:  # type: ignore[type-var]
                for response in responses:
                    if response.finish_reason is not None and not response.choice:
                        progress.add(response.input_token_len, response.generate_token_len)
                    yield response

    def _jobs(self, prompts: Any, gen_config: Any, options: dict[str, Any]) -> tuple[list[Job], bool, Call]:
        call, found = Call(**options), prompts_of(prompts, self.offline.service.takes_images)
        configs = call.configs(gen_config, len(found.items))
        way = self._way_of(call)
        requests = {key: self._request(config, way, call) for key, config in distinct(configs).items()}
        jobs = [
            self._job(at, as_prompt(item, way, call.do_preprocess, place), config, requests[id(config)], way, place)
            for at, (place, item, config) in enumerate(zip(found.places, found.items, configs, strict=True))
        ]
        return jobs, found.is_one, call

    @staticmethod
    def _job(
        at: int, prompt: Prompt, config: GenerationConfig, request: CompletionRequest, way: PromptStyle, place: str
    ) -> Job:
        return Job(at, prompt, request, way, place, copies=(config.n or 1) if request.n in (None, 1) else 1)

    def _way_of(self, call: Call) -> PromptStyle:
        way = self._way if call.chat_template_config is None else way_of(call.chat_template_config)
        return way if call.do_preprocess else way._replace(stop_words=())

    def _request(self, config: GenerationConfig, way: PromptStyle, call: Call) -> CompletionRequest:
        request = request_of(config, self.offline.service.tokenizer, way.stop_words)
        if (name := call.adapter_name) is None:
            return request
        if name not in (known := self.offline.service.names.adapters):
            given = ", ".join(known) or "none"
            raise RequestError(f"adapter_name: {name!r}; the engine's adapters: {given}", param="adapter_name")
        return request.model_copy(update={"model": name})

    # ---- sessions

    async def generate(
        self,
        messages: Any,
        session_id: int,
        gen_config: GenerationConfig | None = None,
        chat_template_config: ChatTemplateConfig | None = None,
        stream_response: bool = True,
        sequence_start: bool = True,
        sequence_end: bool = True,
        step: int = 0,
        request_output_len: int | None = None,
        stop: bool = False,
        stop_words: list[str] | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        repetition_penalty: float | None = None,
        ignore_eos: bool | None = None,
        **options: Any,
    ) -> AsyncGenerator[GenOut, None]:
        """Runs one turn of a session, in steps or (without `stream_response`) at once. Raises RequestError.

        `sequence_start` starts the session again, `sequence_end` removes it afterwards, `step` goes back to the turn
        that ended with that many tokens, `stop` only ends the current answer. `options`: further fields of `Call`.
        """
        old = ReplacedKeywords(
            request_output_len, top_k, top_p, temperature, repetition_penalty, ignore_eos, stop_words
        )
        call = Call(**options_of(chat_template_config, old, options))
        (config,) = call.configs(gen_config, 1)
        if config.n != 1:
            raise RequestError(
                f"n: {config.n}; a session continues from one answer; give 1, or use batch_infer", param="n"
            )
        if stop:
            self.stop_session(session_id)
            yield GenOut("", 0, 0, 0)
            return
        way = self._way_of(call)
        request = self._request(config, way, call).model_copy(update={"prompt_cache_key": f"session-{session_id}"})
        prompt = as_prompt(prompt_of(messages, self.offline.service.takes_images), way, call.do_preprocess, "messages")
        session = self._sessions.begin(session_id, sequence_start, step)
        try:
            job = Job(0, prompt, request, way, "messages")
            async with contextlib.aclosing(self._turn(session, job, stream_response)) as steps:
                async for out in steps:
                    yield out
        except RequestError:
            self._sessions.refuse(session)
            raise
        finally:
            self._sessions.finish(session, sequence_end)

    async def _turn(self, session: Session, job: Job, is_streamed: bool) -> AsyncGenerator[GenOut, None]:
        """Answers a turn; the answer so far stays in the session, even if it was stopped."""
        new, num_before, parts = job.prompt, session.num_tokens, list[Response]()
        whole = session.with_history(new)
        job = job._replace(prompt=whole, history=session.token_ids if session.is_plain else ())
        token_ids: list[int] = []

        async def responses() -> AsyncGenerator[Response, None]:
            begun = await begin(self.offline.service, job)
            token_ids.extend(begun.token_ids)
            async with contextlib.aclosing(begun.responses(self.offline.service)) as items:
                async for item in items:
                    yield item

        try:
            async with contextlib.aclosing(bridged(self.offline, responses(), session.works)) as items:
                async for item in items:
                    parts.append(item)
                    if is_streamed:
                        yield _out(item, num_before)
        except Stopped:
            num_tokens = parts[-1].generate_token_len if parts else 0
            parts.append(Response("", num_tokens, len(token_ids) or num_before, session.session_id, "abort"))
            if is_streamed:
                yield _out(parts[-1], num_before)
        finally:
            if parts and parts[-1].error is None and token_ids:
                answer = joined(parts)
                said = answer.token_ids
                if said and answer.finish_reason == "stop" and said[-1] in self.offline.checkpoint.eos_token_ids:
                    said = said[:-1]  # leaves out an end token, which would end the conversation
                session.add(new, [*token_ids, *said], answer.text)
        if not is_streamed:
            yield _out(joined(parts), num_before)

    def stop_session(self, session_id: int) -> Done:
        """Ends the current answer; its text so far stays in the session. The result may be awaited."""
        self._sessions.stop(session_id)
        return Done()

    def end_session(self, session_id: int) -> Done:
        """Ends the session's answer, then removes the session. The result may be awaited."""
        self._sessions.end(session_id)
        return Done()

    def session(self, gen_config: GenerationConfig | None = None) -> ChatSession:
        """Begins a conversation for `chat`. The session is a context manager that ends the conversation."""
        return ChatSession(self, self._sessions.new_id(), gen_config)

    def chat(
        self,
        prompt: Any,
        session: ChatSession | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        adapter_name: str | None = None,
        do_preprocess: bool = True,
        **options: Any,
    ) -> ChatSession:
        """Sends `prompt` in a conversation, by default a new one, and returns it: `session.response` is the answer.

        With `stream_response`, iterating over the result yields the answer's parts. Leaving the iteration ends the
        answer; its text so far stays in the session. `options`: further fields of `Call`. Raises RequestError, without
        any change.
        """
        session = self.session() if session is None else session
        call = {"adapter_name": adapter_name, "do_preprocess": do_preprocess, **options}
        session.say(prompt, gen_config, call)
        if not stream_response:
            for _ in session:
                pass
        return session

    def steps(self, items: AsyncGenerator[GenOut, None]) -> Iterator[GenOut]:
        """Yields a turn's steps on this thread."""
        return self.offline.iterate(items)

    async def get_generator(self, stop: bool, session_id: int) -> SessionGenerator:
        """Returns the session's generator when earlier turns have ended. `stop` ends them early."""
        if stop:
            self.stop_session(session_id)
        generator = SessionGenerator(self, session_id)
        await generator.idle()
        return generator

    def turn(self, session_id: int) -> Future[None] | None:
        """Returns a future that is done when the session's current answer has been read."""
        return self._sessions.turn(session_id)


def _out(response: Response, num_before: int) -> GenOut:
    return GenOut(
        response.text,
        num_before,
        max(0, response.input_token_len - num_before),
        response.generate_token_len,
        response.finish_reason,
        response.token_ids,
        response.logprobs,
        response.error,
    )
