"""vLLM's flags as arguments of `LLM`, with a real engine: they have the effect that they have on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.errors import ConfigError
from pd_cluster.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEMPLATE = "{{ mood | default('no mood') }}:{{ messages[0].content }}"

pytestmark = pytest.mark.usefixtures("one_thread")


def test_compact_json_and_variables_of_the_template(checkpoint: Any) -> None:
    folder: Path = checkpoint("llama")
    tokenizer = Tokenizer(folder)
    with LLM(
        model=str(folder),
        max_model_len=256,
        num_blocks=64,
        chat_template=TEMPLATE,
        default_chat_template_kwargs={"mood": "glad"},
        structured_outputs_config={"disable_any_whitespace": True},
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=60)
        guided = llm.generate(["a"], params, use_tqdm=False, guided_options_request={"guided_json": SCHEMA})
        assert guided[0].outputs[0].text in ('{"a":1,"b":3}', '{"a":2,"b":3}')
        message = [{"role": "user", "content": "Hi"}]
        for variables, text in ((None, "glad:Hi"), ({"mood": "sad"}, "sad:Hi")):
            (answer,) = llm.chat(message, params, use_tqdm=False, chat_template_kwargs=variables)
            assert answer.prompt_token_ids is not None
            shown = tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=True)
            assert shown.removesuffix("\n").endswith(text)


def test_a_wrong_value_is_refused_in_python_s_words(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match=r"structured_outputs_config: .*unknown field `no`"):
        LLM(model=str(checkpoint("llama")), structured_outputs_config={"no": 1})
