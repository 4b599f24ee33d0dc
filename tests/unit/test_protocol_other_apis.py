"""Client requests: fields of vLLM and other APIs are honoured, refused by name, or logged as without effect."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.service.schema import completion_protocol
from pd_cluster.service.schema import request_parsing as parsing
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest, GenerateRequest, GenerationRequest
from pd_cluster.service.schema.messages.messages_protocol import MessagesRequest
from pd_cluster.service.schema.pooling.pooling_protocol import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    parse_pooling,
)
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.schema.responses.responses_protocol import ResponsesRequest
from pd_cluster.service.schema.tokens.tokens_protocol import TokensRequest
from tests.support.documented import document_of
from tests.support.parsing import MINIMAL, OTHERS, parsed, refused


def test_numbers_of_other_apis_may_be_written_so_too() -> None:
    written: dict[str, Any] = {"temperature": "0.5", "top_k": 3.0}
    for kind, body in OTHERS:
        request = parse(json.dumps({**body, **written}).encode(), kind, has_own_names=True)
        assert (request.temperature, request.top_k) == (0.5, 3)
    made = parse(b'{"input": "a", "repetition_penalty": "1.1", "stop_token_ids": [3.0]}', ResponsesRequest, True)
    assert (made.repetition_penalty, made.stop_token_ids) == (1.1, [3])


def test_zero_is_not_false() -> None:
    """0 and false differ, as in the API's document."""
    bodies = dict(OTHERS)
    for kind, name in (
        *((ResponsesRequest, "watermarking"), (ResponsesRequest, "background"), (MessagesRequest, "watermarking")),
    ):
        parse(json.dumps({**bodies[kind], name: False}).encode(), kind, has_own_names=True)
        for number in (0, 0.0):
            with pytest.raises(RequestError, match=f"^{name}: {number}: Input should be False$"):
                parse(json.dumps({**bodies[kind], name: number}).encode(), kind, has_own_names=True)


VLLM_SAMPLING = [
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "use_beam_search", "length_penalty", "early_stopping", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "max_tokens", "min_tokens", "prompt_logprobs", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "logits_processors", "truncate_prompt_tokens", "bad_words", "guided_decoding"),
    *("structured_outputs", "logit_bias", "allowed_token_ids", "extra_args", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "guided_whitespace_pattern", "thinking_token_budget"),
]


def test_every_sampling_parameter_of_vllm_is_honoured_or_refused() -> None:
    """Covers the parameters of 0.6.0 and of today. Each honoured one has a test of its effect in tests/api."""
    for name in VLLM_SAMPLING:
        refused = {**completion_protocol.NOT_YET, **completion_protocol.ELSEWHERE}
        assert (name in ChatCompletionRequest.model_fields) != (name in refused), name
    assert all("logprobs" in kind.model_fields for kind in MINIMAL)


def test_what_is_for_chats_is_refused_elsewhere() -> None:
    for kind in (CompletionRequest, GenerateRequest):
        for name in completion_protocol.CHAT_ONLY:
            for neutral in (None, *completion_protocol.CHAT_ONLY[name]):
                parsed(kind, **{name: neutral})
            error = refused(json.dumps({**MINIMAL[kind], name: ["something", {"else": 1}]}).encode(), kind)
            assert error.param == name
            assert "/v1/chat/completions" in str(error)


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=parsing.__name__):
        for _ in range(3):
            parsed(brand_new_field=1, metadata={"a": "b"}, service_tier="auto", store=True)
    told = [record.getMessage() for record in caplog.records]
    assert ["brand_new_field" in line for line in told] == [True]


def told_unknown(caplog: pytest.LogCaptureFixture, body: dict[str, Any], kind: Any, has_own_names: bool) -> set[str]:
    """Returns the fields that are logged as without effect."""
    parsing.logged_fields.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=parsing.__name__):
        parse(json.dumps(body).encode(), kind, has_own_names)
    return {record.getMessage().split("'")[1] for record in caplog.records}


def test_another_apis_names_are_logged_where_they_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    unknown: dict[str, Any] = {"suffix": "a", "reasoning_effort": "low", "guided_json": {}}
    for kind, body in OTHERS:
        assert told_unknown(caplog, {**body, **unknown, "store": True}, kind, True) == {*unknown}
    assert told_unknown(caplog, {"prompt": "a", "suffix": "", "tools": []}, CompletionRequest, False) == set()


def test_sessions_of_tokens_have_an_effect_and_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    body = {"token_ids": [5], "session_id": "a", "prompt_cache_key": "b"}
    assert told_unknown(caplog, body, TokensRequest, False) == set()
    made = parse(json.dumps(body).encode(), TokensRequest).completion()
    assert (made.session_id, made.prompt_cache_key) == ("a", "b")


def test_parameters_that_would_change_the_answer_are_not_ignored() -> None:
    for name in (
        *("kv_transfer_params", "ec_transfer_params", "prompt_embeds", "logprob_token_ids", "repetition_detection"),
    ):
        assert refused(json.dumps({"prompt": "a", name: {"host": "10.0.0.1"}}).encode()).param == name


# Fields of vLLM 0.33's requests that OpenAI's lack, except sampling parameters (VLLM_SAMPLING).
VLLMS_OF_ALL = {
    *("cache_salt", "ec_transfer_params", "include_metrics", "kv_transfer_params", "logprob_token_ids", "mm_payload"),
    *("priority", "repetition_detection", "request_id", "return_mm_kwargs", "return_token_ids"),
    *("return_token_offsets", "return_tokens_as_token_ids", "routed_experts_prompt_start", "session_id"),
    *("stream_interval", "truncation_side", "vllm_xargs", "watermarking"),
}
VLLMS_OF_CHATS = {
    *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("documents", "echo", "include_reasoning", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text"),
}
VLLMS_OF_RESPONSES = {
    *("cache_salt", "chat_template_kwargs", "ec_transfer_params", "enable_response_messages", "frequency_penalty"),
    *("ignore_eos", "include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "logit_bias"),
    *("media_io_kwargs", "min_p", "mm_payload", "mm_processor_kwargs", "presence_penalty", "previous_input_messages"),
    *("priority", "repetition_penalty", "request_id", "return_mm_kwargs", "seed", "session_id"),
    *("skip_special_tokens", "stop", "stop_token_ids", "structured_outputs", "top_k", "vllm_xargs", "watermarking"),
}
VLLMS_OF_TOKENS = {
    *("cache_salt", "content_parts", "ec_transfer_params", "include_metrics", "kv_transfer_params", "output_mode"),
    *(
        "parse_context",
        "priority",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "request_id",
        "return_token_ids",
        "token_offsets",
    ),
}
VLLMS_OF_RANKING = {
    *("max_tokens_per_doc", "max_tokens_per_query", "mm_processor_kwargs", "padding", "priority", "request_id"),
    *("truncate_prompt_tokens", "truncation_side", "use_activation"),
}
VLLMS_OF_EMBEDDING = {
    *("add_special_tokens", "cache_salt", "chat_template", "chat_template_kwargs", "embed_dtype", "endianness"),
    *("messages", "mm_processor_kwargs", "normalize", "padding", "priority", "request_id"),
    *("truncate_prompt_tokens", "truncation_side", "use_activation"),
}


def test_every_field_of_vllms_routes_is_known() -> None:
    """Every field is honoured, refused by name, or listed as irrelevant to the answer."""
    elsewhere = {*completion_protocol.NOT_YET, *completion_protocol.ELSEWHERE, *completion_protocol.HARMLESS}
    for fields, model, other in (
        (
            VLLMS_OF_ALL | {"add_special_tokens", "echo", "prompt_embeds"},
            CompletionRequest,
            elsewhere,
        ),
        (
            VLLMS_OF_ALL | VLLMS_OF_CHATS,
            ChatCompletionRequest,
            elsewhere,
        ),
        (VLLMS_OF_RESPONSES, ResponsesRequest, completion_protocol.HARMLESS),
        (VLLMS_OF_TOKENS, TokensRequest, set()),
        (VLLMS_OF_EMBEDDING, EmbeddingRequest, EmbeddingRequest.REFUSED.keys()),
        (VLLMS_OF_RANKING, RerankRequest, RerankRequest.REFUSED.keys()),
    ):
        assert not fields - {*model.model_fields} - {*other}, model


def test_rendered_requests_of_vllm_are_read() -> None:
    """vLLM's renderer adds hints for its own engine, which are ignored unless they would change the answer."""
    body = {"token_ids": [5], "token_offsets": [[0, 1]], "reasoning_parser_kwargs": {"a": 1}, "reasoning_ended": False}
    request = parse(json.dumps({**body, "output_mode": "tokens", "content_parts": None}).encode(), TokensRequest)
    assert request.completion().prompt == [5]
    for wanted in (True, False):
        parse(json.dumps({**body, "return_token_ids": wanted}).encode(), TokensRequest)
    for fields in ({"output_mode": "derender"}, {"content_parts": [{"type": "text"}]}):
        with pytest.raises(RequestError, match=next(iter(fields))):
            parse(json.dumps({**body, **fields}).encode(), TokensRequest).completion()
    guided = {**body, "sampling_params": {"structured_outputs": {"choice": ["a"]}}}
    with pytest.raises(RequestError, match="reasoning_ended: false"):
        parse(json.dumps(guided).encode(), TokensRequest).completion()


def test_items_are_documents_of_another_name() -> None:
    asked = parse_pooling(b'{"queries": "a", "items": ["b", "c"]}', ScoreRequest)
    assert asked.pairs() == ([("a", "b"), ("a", "c")], ("queries", "items"))
    both, empty = {"queries": "a", "items": "b", "documents": "b"}, {"queries": "a", "items": []}
    for wrong, field in ((both, "items"), (empty, "items"), ({"items": "b"}, "queries")):
        with pytest.raises(RequestError, match=f"^{field}: "):
            parse_pooling(json.dumps(wrong).encode(), ScoreRequest).pairs()


def test_rankings_are_not_cut_or_padded_otherwise() -> None:
    others: list[tuple[str, Any, Any]] = [("padding", "do_not_pad", "x"), ("truncation_side", None, "right")]
    for name, neutral, wrong in others:
        for kind, pair in ((RerankRequest, {"query": "a"}), (ScoreRequest, {"queries": "a"})):
            parse_pooling(json.dumps({**pair, "documents": ["b"], name: neutral}).encode(), kind)
            with pytest.raises(RequestError, match=f"{name}: .* is not supported"):
                parse_pooling(json.dumps({**pair, "documents": ["b"], name: wrong}).encode(), kind)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_sglangs_names_are_refused_with_those_there_are(kind: type[GenerationRequest]) -> None:
    for name, (neutral, way_out) in completion_protocol.SGLANGS.items():
        for value in (None, *neutral):
            parse(json.dumps({**MINIMAL[kind], name: value}).encode(), kind)
        with pytest.raises(RequestError, match=rf"^{name}: .*not a parameter here; {re.escape(way_out)}$") as caught:
            parse(json.dumps({**MINIMAL[kind], name: True if neutral == (False,) else "x"}).encode(), kind)
        assert caught.value.param == name


def test_what_changes_nothing_is_documented() -> None:
    """Fields without effect are listed by the server and on the page for clients."""
    told = document_of()["info"]["description"]
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
    assert [name for name in completion_protocol.HARMLESS if name not in told or f"`{name}`" not in page] == []
