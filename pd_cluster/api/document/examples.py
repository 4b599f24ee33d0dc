"""Example requests for the OpenAPI document: a cluster with default settings answers each one with 200."""

from __future__ import annotations

from typing import Any

Examples = dict[str, dict[str, Any]]  # name -> {"summary": …, "value": the request's body}

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TERMS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
USAGE = {"include_usage": True}


def chat_examples(model: str, has_tools: bool) -> Examples:
    plain = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER_SCHEMA}}
    system = {"role": "system", "content": "Answer in one word."}
    function = {"name": "add", "description": "Adds two numbers.", "parameters": TERMS}
    called = {
        **plain,
        "max_tokens": 64,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    tools = {"tools": _example("A call of a function", called)} if has_tools else {}
    return {
        **tools,
        "plain": _example("A question", plain),
        "streamed": _example("The same, streamed", {**plain, "stream": True, "stream_options": USAGE}),
        "json_schema": _example("An answer of a given form", {**plain, "response_format": schema}),
        "logprobs": _example(
            "With the most likely tokens",
            {**plain, "messages": [system, *QUESTION], "max_tokens": 4, "logprobs": True, "top_logprobs": 3},
        ),
    }


def completion_examples(model: str) -> Examples:
    plain = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}
    return {
        "plain": _example("A text to go on with", plain),
        "streamed": _example("The same, streamed", {**plain, "stream": True, "stream_options": USAGE}),
        "several": _example("Several prompts at once", {**plain, "prompt": ["One, two,", "A, B,"], "max_tokens": 4}),
        "token_ids": _example("Token ids in and out", {**plain, "prompt": [1, 2, 3], "return_token_ids": True}),
        "drawn": _example("Two drawn texts", {**plain, "temperature": 0.8, "top_p": 0.9, "seed": 7, "n": 2}),
        "logprobs": _example(
            "How likely a text is", {**plain, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
        ),
    }


def generate_examples() -> Examples:
    plain = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}
    return {
        "plain": _example("A text to go on with", plain),
        "streamed": _example("The same, streamed", {**plain, "stream": True}),
        "choice": _example("One of two words", {**plain, "guided_choice": ["Paris", "Rome"]}),
    }


def tokenize_examples(model: str) -> Examples:
    return {
        "text": _example("A text", {"model": model, "prompt": "hello", "return_token_strs": True}),
        "chat": _example("A conversation, as its template writes it", {"model": model, "messages": QUESTION}),
    }


def pooling_examples(model: str) -> dict[str, Examples]:
    texts = ["The sea is wide.", "Stones sink."]
    return {
        "embeddings": {
            "texts": _example("Two texts", {"model": model, "input": texts, "encoding_format": "float"}),
            "token_ids": _example("Token ids, eight numbers", {"model": model, "input": [1, 2, 3], "dimensions": 8}),
        },
        "score": {"texts": _example("One text against two", {"model": model, "text_1": "water", "text_2": texts})},
        "rerank": {"documents": _example("The nearest of two", {"model": model, "query": "water", "documents": texts})},
    }


def detokenize_examples(model: str) -> Examples:
    return {"ids": _example("Three tokens", {"model": model, "tokens": [1, 2, 3]})}


def _example(summary: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "value": value}
