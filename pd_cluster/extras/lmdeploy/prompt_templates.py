"""LMDeploy's chat templates, built in or given by the caller, as Jinja sources.

Knows nothing of tokens. A built-in template has a system prompt only if the model's authors always use one.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import NamedTuple

from pd_cluster.errors import ConfigError
from pd_cluster.extras.lmdeploy.argument_checks import checks_names
from pd_cluster.text.chat_template import ChatTemplate

PLAIN = ("completion", "python")  # capabilities whose texts are passed unchanged
CAPABILITIES = ("chat", *PLAIN)
AROUND = {"user", "assistant", "capability"}  # a template needs at least one of these fields


@checks_names
@dataclass
class ChatTemplateConfig:
    """Parts of a chat template. None: the field's value in the built-in template `model_name`, or empty."""

    model_name: str | None = None
    system: str | None = None
    meta_instruction: str | None = None
    eosys: str | None = None
    user: str | None = None
    eoh: str | None = None
    assistant: str | None = None
    eoa: str | None = None
    stop_word_suffix: str | None = None
    capability: str | None = None
    _: KW_ONLY
    separator: str | None = None  # a newer name of stop_word_suffix
    stop_words: list[str] | None = None


@dataclass(frozen=True)
class RoleMarkers:
    """The texts around each role's messages. `opening` replaces a missing system prompt; `separator` ends an answer."""

    system: str = ""
    meta_instruction: str | None = None
    eosys: str = ""
    user: str = ""
    eoh: str = ""
    assistant: str = ""
    eoa: str = ""
    separator: str = ""
    opening: str = ""
    capability: str = "chat"
    stop_words: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The template in Jinja."""
        if self.meta_instruction is None:
            start = self.opening
        else:
            start = self.system + self.meta_instruction + self.eosys
        around = {
            "message.role in ('system', 'developer')": (self.system, self.eosys),
            "message.role == 'user'": (self.user, self.eoh),
            "message.role == 'assistant'": (self.assistant, self.eoa + self.separator),
        }
        cases = [
            f"{{% elif {test} %}}{{{{ {_quoted(before)} ~ message.content ~ {_quoted(after)} }}}}"
            for test, (before, after) in around.items()
        ]
        refusal = "raise_exception('the role ' ~ message.role ~ ' is not supported')"
        return "".join(
            [
                f"{{% if messages[0].role not in ('system', 'developer') %}}{{{{ {_quoted(start)} }}}}{{% endif %}}",
                "{% for message in messages %}{% if false %}",
                *cases,
                f"{{% else %}}{{{{ {refusal} }}}}{{% endif %}}{{% endfor %}}",
                f"{{% if add_generation_prompt %}}{{{{ {_quoted(self.assistant)} }}}}{{% endif %}}",
            ]
        )


class PromptStyle(NamedTuple):
    """The conversion of a text or a conversation to a prompt. Without a template, the model folder's is used."""

    template: ChatTemplate | None = None
    is_plain: bool = False
    stop_words: tuple[str, ...] = ()


CHATML = RoleMarkers(
    system="<|im_start|>system\n",
    eosys="<|im_end|>\n",
    user="<|im_start|>user\n",
    eoh="<|im_end|>\n",
    assistant="<|im_start|>assistant\n",
    eoa="<|im_end|>",
    separator="\n",
    stop_words=("<|im_end|>",),
)
COMPLETION = RoleMarkers(capability="completion")
INTERNLM = RoleMarkers(
    system="<|System|>:",
    eosys="\n",
    user="<|User|>:",
    eoh="\n",
    assistant="<|Bot|>:",
    eoa="<eoa>",
    separator="\n",
    stop_words=("<eoa>",),
)
LLAMA2 = RoleMarkers(
    system="[INST] <<SYS>>\n",
    eosys="\n<</SYS>>\n\n",
    assistant=" [/INST] ",
    eoa="</s>",
    separator="<s>[INST] ",
    opening="[INST] ",
)
VICUNA = RoleMarkers(eosys=" ", user="USER: ", eoh=" ", assistant="ASSISTANT: ", eoa="</s>", stop_words=("</s>",))
QWEN = replace(CHATML, meta_instruction="You are a helpful assistant.")
INTERNLM2 = replace(CHATML, stop_words=("<|im_end|>", "<|action_end|>"))
YI = replace(CHATML, stop_words=("<|im_end|>", "<|endoftext|>"))

BUILT_IN: dict[str, RoleMarkers] = {
    **dict.fromkeys(("base", "internlm", "llama", "internlm-7b", "internlm-20b"), COMPLETION),
    **dict.fromkeys(("internlm2", "internlm2-1_8b", "internlm2-7b", "internlm2-20b"), COMPLETION),
    **dict.fromkeys(("internlm-chat", "internlm-chat-7b", "internlm-chat-7b-8k", "internlm-chat-8k"), INTERNLM),
    "internlm-chat-20b": INTERNLM,
    **dict.fromkeys(("internlm2-chat", "internlm2-chat-1_8b", "internlm2-chat-7b", "internlm2-chat-20b"), INTERNLM2),
    **dict.fromkeys(("llama2", "llama-2", "llama2-chat", "llama-2-chat"), LLAMA2),
    **dict.fromkeys(("qwen", "qwen-chat", "qwen-7b", "qwen-14b"), QWEN),
    **dict.fromkeys(("vicuna", "wizardlm"), VICUNA),
    **dict.fromkeys(("yi", "yi-chat", "yi-200k", "yi-34b"), YI),
    "chatml": CHATML,
}


def way_of(config: ChatTemplateConfig) -> PromptStyle:
    """Returns the style of a configuration. Raises ConfigError."""
    if not isinstance(config, ChatTemplateConfig):
        raise ConfigError(f"chat_template_config {reprlib.repr(config)}: expected a ChatTemplateConfig")
    given = {name: value for name, value in asdict(config).items() if value is not None}
    name = given.pop("model_name", None)
    if "stop_word_suffix" in given:
        given.setdefault("separator", given.pop("stop_word_suffix"))
    for field, value in given.items():
        texts = value if field == "stop_words" and isinstance(value, list) else [value]
        if (field == "stop_words") != isinstance(value, list) or not all(isinstance(text, str) for text in texts):
            wanted = "a list of texts" if field == "stop_words" else "a text"
            raise ConfigError(f"ChatTemplateConfig.{field} {reprlib.repr(value)}: must be {wanted}")
    base = BUILT_IN.get(str(name).lower())
    if base is None and not AROUND & given.keys():  # otherwise no text would mark the roles
        raise ConfigError(
            f"ChatTemplateConfig.model_name {name!r}: no built-in chat template has that name; there are "
            f"{', '.join(sorted(BUILT_IN))}; or give user, eoh, assistant and eoa"
        )
    if "stop_words" in given:
        given["stop_words"] = tuple(given["stop_words"])
    marks = replace(base or RoleMarkers(), **given)
    if marks.capability not in CAPABILITIES:
        raise ConfigError(
            f"ChatTemplateConfig.capability {marks.capability!r}: expected {' or '.join(CAPABILITIES)}; infilling is "
            f"not supported"
        )
    if marks.capability in PLAIN:
        return PromptStyle(is_plain=True, stop_words=marks.stop_words)
    return PromptStyle(ChatTemplate(marks.source), stop_words=marks.stop_words)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
