"""Reads OpenAI's `prediction`: the expected text of an answer, which saves time where it is right."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_PREDICTION_PARTS = 1024


class PredictionPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # has no effect: prompts are always cached


class Prediction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(max_length=MAX_PREDICTION_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
