"""Arguments of LMDeploy's calls except prompts: options, and former keywords that GenerationConfig replaces."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pd_cluster.errors import RequestError
from pd_cluster.extras.lmdeploy.argument_checks import checks_names, warn
from pd_cluster.extras.lmdeploy.generation_config import GenerationConfig
from pd_cluster.extras.lmdeploy.prompt_templates import ChatTemplateConfig

# Former keywords -> the field of GenerationConfig, and the default value of a call.
OLD: dict[str, tuple[str, Any]] = {
    "request_output_len": ("max_new_tokens", 512),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.8),
    "temperature": ("temperature", 0.8),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "ignore_eos": ("ignore_eos", False),
    "stop_words": ("stop_words", None),
}


class ReplacedKeywords(NamedTuple):
    """The values of a call for the fields of OLD; None: not given."""

    request_output_len: int | None
    top_k: int | None
    top_p: float | None
    temperature: float | None
    repetition_penalty: float | None
    ignore_eos: bool | None
    stop_words: list[str] | None = None


def options_of(
    third: bool | ChatTemplateConfig | None, old: ReplacedKeywords, further: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options of `Call`. `third` is a switch for `do_preprocess`, or the chat template's configuration."""
    if isinstance(third, bool) and "do_preprocess" in further:
        raise TypeError("do_preprocess is given twice: as the third argument and by its name")
    name = "do_preprocess" if isinstance(third, bool) else "chat_template_config"
    found = {key: value for key, value in {name: third, **old._asdict()}.items() if value is not None}
    return {**further, **found}


@checks_names
@dataclass(kw_only=True)
class Call:
    """`do_preprocess`: whether the call's or the engine's chat template makes the prompt.

    The fields in OLD are deprecated. Their defaults are in OLD, and differ from GenerationConfig's.
    """

    do_preprocess: bool = True
    chat_template_config: ChatTemplateConfig | None = None
    use_tqdm: bool = False
    adapter_name: str | None = None
    request_output_len: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_words: list[str] | None = None

    def configs(self, given: Any, num_prompts: int) -> list[GenerationConfig]:
        """Returns a configuration for each prompt. Raises RequestError."""
        old = {name: getattr(self, name) for name in OLD if getattr(self, name) is not None}
        if old:
            aside = ", and have no effect with gen_config" if given is not None else ""
            warn(f"{', '.join(old)}: deprecated{aside}; use gen_config=GenerationConfig(…)", FutureWarning)
        if given is None:
            fields = {field: old.get(name, default) for name, (field, default) in OLD.items()}
            return [GenerationConfig(**fields)] * num_prompts
        if isinstance(given, GenerationConfig):
            return [given] * num_prompts
        return _several(given, num_prompts)


def _several(given: Any, num_prompts: int) -> list[GenerationConfig]:
    several = given if isinstance(given, list) else [given]
    for each in several:
        if not isinstance(each, GenerationConfig):
            raise RequestError(
                f"gen_config: {reprlib.repr(each)}; expected a GenerationConfig, or a list with one for each prompt",
                param="gen_config",
            )
    if len(several) != num_prompts:
        raise RequestError(
            f"gen_config: {len(several)} configurations for {num_prompts} prompts; give one for each, or one for all",
            param="gen_config",
        )
    return several


def distinct(configs: Sequence[GenerationConfig]) -> dict[int, GenerationConfig]:
    """Returns the distinct objects by id, so that a shared configuration is processed once."""
    return {id(config): config for config in configs}
