"""Defines the schema of vLLM's derender routes, which convert whole answers from token ids to text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.completion_protocol import FAIL_FAST, MAX_CHOICES, MAX_PROMPTS, Id, TokenIds

MOST_CHOICES = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
IN_STREAMS = (
    "a stream's events are not derendered one by one; stream /v1/chat/completions, or /inference/v1/generate with "
    'output_mode "text"'
)


class OtherLogprob(BaseModel):
    """A token's logprob, with vLLM's `token_id`, or with this server's `token`, such as "token_id:5"."""

    model_config = ConfigDict(strict=True, extra="allow")
    token_id: Id | None = None
    token: Annotated[str, Field(pattern=r"^token_id:[0-9]{1,10}$")] | None = None
    logprob: float = Field(allow_inf_nan=False)
    rank: int | None = None

    @property
    def id(self) -> int:
        """The token's id. Raises RequestError if there is none."""
        if self.token_id is not None:
            return self.token_id
        if self.token is None:
            raise RequestError("logprobs: each needs a token_id", param="logprobs")
        return int(self.token.removeprefix("token_id:"))


class DerenderedLogprob(OtherLogprob):
    """The logprob of a chosen token, and the logprobs of alternatives."""

    top_logprobs: Annotated[list[OtherLogprob], FAIL_FAST] = []


class DerenderedLogprobs(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    content: Annotated[list[DerenderedLogprob], FAIL_FAST] | None = None


class DerenderedChoice(BaseModel):
    """A choice of /inference/v1/generate."""

    model_config = ConfigDict(strict=True, extra="allow")
    index: int = Field(ge=0, lt=MAX_CHOICES)
    token_ids: Annotated[list[Id], FAIL_FAST] = []
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    logprobs: DerenderedLogprobs | None = None

    @property
    def told(self) -> list[DerenderedLogprob] | None:
        return None if self.logprobs is None else self.logprobs.content


class DerenderedAnswer(BaseModel):
    """A whole answer of /inference/v1/generate."""

    model_config = ConfigDict(strict=True, extra="allow")
    request_id: str = Field(default="", max_length=256)
    choices: Annotated[list[DerenderedChoice], MOST_CHOICES]
    output_mode: Literal["tokens"] | None = None
    prompt_token_ids: TokenIds | None = None

    def in_order(self) -> list[DerenderedChoice]:
        """Returns the choices by index. Raises RequestError unless the indices are complete."""
        found = sorted(self.choices, key=lambda choice: choice.index)
        if [each.index for each in found] != list(range(len(found))):
            raise RequestError(f"choices: indices must be 0 to {len(found) - 1}, each once", param="choices")
        return found


class DerenderRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    stream: bool | None = None

    def check_whole(self) -> None:
        """Raises RequestError for a stream."""
        if self.stream:
            raise RequestError(f"stream: {IN_STREAMS}", param="stream")


class DerenderChatRequest(DerenderRequest):
    """`chat_request`: the rendered conversation, which determines how the answer is read."""

    generate_response: DerenderedAnswer
    chat_request: dict[str, Any]
    prompt_tokens: int | None = Field(default=None, ge=0)
    prompt_token_ids: TokenIds | None = None


class DerenderCompletionRequest(DerenderRequest):
    """An answer for each prompt of the rendered completion."""

    generate_responses: Annotated[list[DerenderedAnswer], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    completion_request: dict[str, Any]
    prompt_tokens: Annotated[list[Annotated[int, Field(ge=0)]], FAIL_FAST] | None = None
    prompt_token_ids: Annotated[list[TokenIds | None], FAIL_FAST] | None = None
