"""FastDeploy's ErnieBotTokenizer for any model; uses the tokenizer and chat template of the model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from pd_cluster.checkpoints import paddle_layout
from pd_cluster.checkpoints.hub import resolve_model
from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.checkpoints.vision_config import IMAGE_TYPES
from pd_cluster.errors import RequestError
from pd_cluster.service.prompts.conversation import conversation_of
from pd_cluster.service.schema.chat_protocol import ChatFields
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.text.chat_template import checks_none
from pd_cluster.text.tokenizer import Tokenizer


class ErnieBotTokenizer:
    def __init__(self, tokenizer: Tokenizer, takes_images: bool = False) -> None:
        self._tokenizer, self._takes_images = tokenizer, takes_images

    @classmethod
    def from_pretrained(cls, path: str, revision: str = "") -> Self:
        """Opens a model folder, or a model of a hub. Raises ModelError."""
        folder = resolve_model(str(path), revision, needs_weights=False)
        file = folder / "config.json"
        model_type = paddle_layout.model_type_of(read_json(file)) if file.exists() else None
        return cls(Tokenizer(folder), model_type in IMAGE_TYPES)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Returns the prompt that the chat template makes, or its token ids. A message may consist of texts and, if the
        model takes images, of images, each of which becomes a placeholder.

        `variables`: variables for the template, such as `enable_thinking`. Raises RequestError.
        """
        template = self._tokenizer.template
        if template is None:
            raise RequestError("conversation: the model's folder has no chat template", param="messages")
        body = {
            "messages": list(conversation),
            "add_generation_prompt": add_generation_prompt,
            "chat_template_kwargs": variables or None,
        }
        try:
            request = parse(msgspec.json.encode(body), ChatFields)
        except (TypeError, ValueError) as error:  # values that JSON cannot express
            raise RequestError(f"conversation: {error}", param="messages") from None
        text = conversation_of(
            request,
            template.variables,
            takes_images=self._takes_images,
            checks_none=checks_none(template.source),
            roles=template.roles,
        ).render(template)
        return self._tokenizer.encode(text, False) if tokenize else text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}
