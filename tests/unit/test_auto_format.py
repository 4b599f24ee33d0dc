"""The formats that `auto` chooses by the texts in chat templates and by model types."""

from __future__ import annotations

import logging

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.parsers.auto_format import AUTO, BY_TEMPLATE, BY_TYPE, formats_of_model
from pd_cluster.parsers.format_table import FORMATS, THINKING
from pd_cluster.parsers.reply_format import ReplyFormat, check_names, resolved_names
from pd_cluster.service.preprocessing.chat_preprocessor import reply_format_of
from pd_cluster.settings.request_settings import ChatConfig
from pd_cluster.text.tokenizer import Tokenizer

QWEN3 = "{{- '<tool_call>\\n{\"name\": \"' }}{{- '</tool_call>' }}{{ '<think>\\n\\n</think>\\n\\n' }}"
CODER = "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + name + '>\\n' }}"
CHANNELS = "<|start|>assistant<|channel|>analysis<|message|> to=functions. <|call|>"


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        (QWEN3, "qwen3", ("hermes", "qwen3")),
        (QWEN3.replace("think>", "thought>"), "qwen2", ("hermes", "")),
        (CODER, "qwen3_moe", ("qwen3_coder", "")),
        (f"{CODER}<think>", "step3p5", ("qwen3_coder", "qwen3")),
        (f"{CODER}<think>", "mimo_v2_flash", ("mimo", "mimo")),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key><think></think>", "glm4_moe", ("glm45", "glm45")),
        ("<tool_calls><tool_call>{{ name }}<tool_sep><arg_key><think>", "hy_v3", ("hy_v3", "hy_v3")),
        ("<｜tool▁calls▁begin｜>```json<｜Assistant｜>", "deepseek_v3", ("deepseek_v3", "")),
        ("<｜tool▁calls▁begin｜>```json<｜Assistant｜><think>", "deepseek_v3", ("deepseek_v3", "deepseek_r1")),
        ("", "deepseek_v32", ("deepseek_v32", "deepseek_v3")),
        ("]<]minimax[>[<tool_call><mm:think>", "", ("minimax_m3", "minimax_m3")),
        ("[TOOL_CALLS] {{ calls }}", "mistral", ("mistral", "")),
        ("[TOOL_CALLS][THINK]", "mistral", ("mistral", "mistral")),
        ("<|python_tag|>", "llama", ("llama3_json", "")),
        (CHANNELS, "gpt_oss", ("openai", "openai_gptoss")),
        ("<|im_start|>", "gpt_oss", ("openai", "openai_gptoss")),
        ("'<|tool_call>call:' + name <|channel>thought", "gemma4_text", ("gemma4", "gemma4")),
        ("", "gemma4_text", ("gemma4", "gemma4")),
        ("<start_function_call>call:", "gemma3_text", ("functiongemma", "")),
        ("<|START_ACTION|><|START_THINKING|><|START_RESPONSE|>", "cohere2", ("cohere_command3", "cohere_command3")),
        ("<|START_ACTION|><|START_TEXT|>", "cohere2_moe", ("cohere_command4", "")),
        ("<|tool_list_start|>", "lfm2_moe", ("lfm2", "")),
        ("<function_calls><think>", "olmo3", ("olmo3", "olmo3")),
        ("<|bom|><tool_calls>", "jamba", ("jamba", "")),
        ("<tool_call></think><think><response>", "ernie4_5_moe", ("ernie45", "ernie45")),
        ("<|im_start|>user", "llama", ("", "")),
        ("", "mimosa", ("", "")),
    ],
)
def test_the_template_decides_and_otherwise_the_type(template: str, model_type: str, expected: tuple[str, str]) -> None:
    assert formats_of_model(template, model_type).formats == expected
    assert resolved_names(AUTO, AUTO, template, model_type) == expected
    ReplyFormat(*resolved_names(AUTO, "", template, model_type))


def test_rows_name_formats_that_there_are() -> None:
    for formats in (*(formats for _, formats in BY_TEMPLATE), *BY_TYPE.values()):
        assert formats.tool_parser in FORMATS
        assert formats.reasoning_parser in ("", *THINKING)


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert resolved_names(AUTO, "", QWEN3, "") == ("hermes", "")
    assert "tool-call-parser auto: hermes, because of <tool_call> in the template" in caplog.text
    caplog.clear()
    assert resolved_names("mistral", AUTO, "", "llama") == ("mistral", "")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "reasoning-parser auto" in record.message
    caplog.clear()
    assert resolved_names("mistral", "", "", "llama") == ("mistral", "")
    assert not caplog.records


def test_a_server_s_replies_are_read_in_the_model_s_format() -> None:
    chat = ChatConfig(tool_parser=AUTO, reasoning_parser=AUTO)
    form = reply_format_of(chat, Tokenizer(None), "minimax_m3")
    assert (form.tool_parser, form.reasoning_parser) == ("minimax_m3", "minimax_m3")


def test_tokens_that_turns_share_with_calls_are_text_in_earlier_replies() -> None:
    for form in (ReplyFormat(), ReplyFormat("kimi_k3", "kimi_k3"), ReplyFormat("gigachat3")):
        assert not form.history_marks & {"<|open|>", "<|close|>", "<|sep|>", "<|role_sep|>\n", "<|message_sep|>\n\n"}
    assert {"<|open|>", "<|sep|>"} <= ReplyFormat("kimi_k3").markers
    assert "<|function_call|>" in ReplyFormat("gigachat3").history_marks


def test_unknown_names_beside_auto_are_refused() -> None:
    check_names(AUTO, "openai_gptoss", {})
    check_names("openai", AUTO, {})
    for names in ((AUTO, "quen3"), ("hermess", AUTO)):
        with pytest.raises(ConfigError, match="did you mean"):
            check_names(*names, {})
