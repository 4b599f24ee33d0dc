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
    tools = {"tools": example("A call of a function", called)} if has_tools else {}
    return {
        **tools,
        "plain": example("A question", plain),
        "streamed": example("The same, streamed", {**plain, "stream": True, "stream_options": USAGE}),
        "json_schema": example("An answer of a given form", {**plain, "response_format": schema}),
        "logprobs": example(
            "With the most likely tokens",
            {**plain, "messages": [system, *QUESTION], "max_tokens": 4, "logprobs": True, "top_logprobs": 3},
        ),
    }


def completion_examples(model: str) -> Examples:
    plain = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}
    return {
        "plain": example("A text to go on with", plain),
        "streamed": example("The same, streamed", {**plain, "stream": True, "stream_options": USAGE}),
        "several": example("Several prompts at once", {**plain, "prompt": ["One, two,", "A, B,"], "max_tokens": 4}),
        "token_ids": example("Token ids in and out", {**plain, "prompt": [1, 2, 3], "return_token_ids": True}),
        "drawn": example("Two drawn texts", {**plain, "temperature": 0.8, "top_p": 0.9, "seed": 7, "n": 2}),
        "logprobs": example(
            "How likely a text is", {**plain, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
        ),
    }


def generate_examples() -> Examples:
    plain = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}
    return {
        "plain": example("A text to go on with", plain),
        "streamed": example("The same, streamed", {**plain, "stream": True}),
        "choice": example("One of two words", {**plain, "guided_choice": ["Paris", "Rome"]}),
    }


def responses_examples(model: str) -> Examples:
    plain = {"model": model, "input": "What is 3 + 4?", "temperature": 0, "max_output_tokens": 32}
    form = {"type": "json_schema", "name": "answer", "schema": ANSWER_SCHEMA}
    return {
        "plain": example("A question", {**plain, "instructions": "Answer in one word."}),
        "streamed": example("The same, streamed", {**plain, "stream": True}),
        "items": example("A conversation", {**plain, "input": QUESTION}),
        "json_schema": example("An answer of a given form", {**plain, "text": {"format": form}}),
    }


def messages_examples(model: str) -> Examples:
    plain = {"model": model, "messages": QUESTION, "max_tokens": 32}
    form = {"type": "json_schema", "schema": ANSWER_SCHEMA}
    return {
        "plain": example("A question", {**plain, "system": "Answer in one word."}),
        "streamed": example("The same, streamed", {**plain, "stream": True}),
        "json_schema": example("An answer of a given form", {**plain, "output_config": {"format": form}}),
    }


def count_examples(model: str) -> Examples:
    return {"plain": example("A question", {"model": model, "messages": QUESTION})}


def tokens_examples(model: str) -> Examples:
    plain = {"model": model, "token_ids": [1, 2, 3], "sampling_params": {"temperature": 0, "max_tokens": 16}}
    shown = {"temperature": 0, "max_tokens": 4, "logprobs": 2}
    return {
        "plain": example("Tokens to go on with", plain),
        "streamed": example("The same, streamed", {**plain, "stream": True}),
        "logprobs": example("With the most likely tokens", {**plain, "sampling_params": shown}),
    }


def batch_examples(model: str) -> Examples:
    other = [{"role": "user", "content": "What is 5 + 6?"}]
    several = {"model": model, "messages": [QUESTION, other], "temperature": 0, "max_tokens": 16}
    return {"plain": example("Two questions", several)}


def invocation_examples(model: str) -> Examples:
    return {
        "chat": chat_examples(model, has_tools=False)["plain"],
        "completion": completion_examples(model)["streamed"],
        "embedding": example("A vector", {"model": model, "input": "The capital of France is Paris."}),
    }


def tokenize_examples(model: str) -> Examples:
    return {
        "text": example("A text", {"model": model, "prompt": "hello", "return_token_strs": True}),
        "chat": example("A conversation, as its template writes it", {"model": model, "messages": QUESTION}),
    }


def detokenize_examples(model: str) -> Examples:
    return {"ids": example("Three tokens", {"model": model, "tokens": [1, 2, 3]})}


def example(summary: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "value": value}
