"""Example requests for the OpenAPI document. A cluster with default settings answers each with 200."""

from __future__ import annotations

from typing import Any

Examples = dict[str, tuple[str, dict[str, Any]]]  # name -> (summary, the request's body without the model's name)

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


_CHAT = {"messages": QUESTION, "temperature": 0, "max_tokens": 32}
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER_SCHEMA}}
_FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": TERMS}
_CALLED = {"max_tokens": 64, "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"}
TOOLS: Examples = {"tools": ("A call of a function", {**_CHAT, **_CALLED})}
CHAT: Examples = {
    "plain": ("A question", _CHAT),
    "streamed": ("The same, streamed", {**_CHAT, "stream": True, "stream_options": USAGE}),
    "json_schema": ("An answer of a given form", {**_CHAT, "response_format": _SCHEMA}),
    "logprobs": (
        "With the most likely tokens",
        {**_CHAT, "messages": [_SYSTEM, *QUESTION], "max_tokens": 4, "logprobs": True, "top_logprobs": 3},
    ),
}

_TEXT = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}
COMPLETION: Examples = {
    "plain": ("A text to continue", _TEXT),
    "streamed": ("The same, streamed", {**_TEXT, "stream": True, "stream_options": USAGE}),
    "several": ("Several prompts at once", {**_TEXT, "prompt": ["One, two,", "A, B,"], "max_tokens": 4}),
    "token_ids": ("Token ids in and out", {**_TEXT, "prompt": [1, 2, 3], "return_token_ids": True}),
    "drawn": ("Two sampled texts", {**_TEXT, "temperature": 0.8, "top_p": 0.9, "seed": 7, "n": 2}),
    "logprobs": ("How likely a text is", {**_TEXT, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
}
GENERATE: Examples = {
    "plain": ("A text to continue", _TEXT),
    "streamed": ("The same, streamed", {**_TEXT, "stream": True}),
    "choice": ("One of two words", {**_TEXT, "guided_choice": ["Paris", "Rome"]}),
}

_INPUT = {"input": "What is 3 + 4?", "temperature": 0, "max_output_tokens": 32}
_FORMAT = {"type": "json_schema", "name": "answer", "schema": ANSWER_SCHEMA}
RESPONSES: Examples = {
    "plain": ("A question", {**_INPUT, "instructions": "Answer in one word."}),
    "streamed": ("The same, streamed", {**_INPUT, "stream": True}),
    "items": ("A conversation", {**_INPUT, "input": QUESTION}),
    "json_schema": ("An answer of a given form", {**_INPUT, "text": {"format": _FORMAT}}),
}

_TURNS = {"messages": QUESTION, "max_tokens": 32}
_OUTPUT = {"format": {"type": "json_schema", "schema": ANSWER_SCHEMA}}
MESSAGES: Examples = {
    "plain": ("A question", {**_TURNS, "system": "Answer in one word."}),
    "streamed": ("The same, streamed", {**_TURNS, "stream": True}),
    "json_schema": ("An answer of a given form", {**_TURNS, "output_config": _OUTPUT}),
}
COUNT: Examples = {"plain": ("A question", {"messages": QUESTION})}

_TOKENS = {"token_ids": [1, 2, 3], "sampling_params": {"temperature": 0, "max_tokens": 16}}
_SHOWN = {"temperature": 0, "max_tokens": 4, "logprobs": 2}
TOKENS: Examples = {
    "plain": ("Tokens to continue", _TOKENS),
    "streamed": ("The same, streamed", {**_TOKENS, "stream": True}),
    "logprobs": ("With the most likely tokens", {**_TOKENS, "sampling_params": _SHOWN}),
}
_OTHER = [{"role": "user", "content": "What is 5 + 6?"}]
BATCH: Examples = {"plain": ("Two questions", {"messages": [QUESTION, _OTHER], "temperature": 0, "max_tokens": 16})}
INVOCATION: Examples = {
    "chat": CHAT["plain"],
    "completion": COMPLETION["streamed"],
    "embedding": ("A vector", {"input": "The capital of France is Paris."}),
}
TOKENIZE: Examples = {
    "text": ("A text", {"prompt": "hello", "return_token_strs": True}),
    "chat": ("A conversation, as its template writes it", {"messages": QUESTION}),
}
DETOKENIZE: Examples = {"ids": ("Three tokens", {"tokens": [1, 2, 3]})}
EMBEDDING: Examples = {
    "plain": ("A text", {"input": "The capital of France is Paris."}),
    "several": ("Several, as bytes", {"input": ["one", "two"], "encoding_format": "base64"}),
    "token_ids": ("Token ids, and a short vector", {"input": [1, 2, 3], "dimensions": 8}),
}
POOLING: Examples = {"plain": EMBEDDING["plain"], "token_ids": ("Token ids", {"input": [1, 2, 3], "task": "embed"})}
COHERE_EMBED: Examples = {"plain": ("Two texts", {"texts": ["one", "two"], "embedding_types": ["float", "base64"]})}
_LABELS = {"query": "Is this a city? ", "items": ["Paris", "Cats"], "label_token_ids": [1, 2]}
GENERATIVE_SCORING: Examples = {"plain": ("Two items", _LABELS)}
_ANSWER = {"request_id": "chatcmpl-1", "choices": [{"index": 0, "token_ids": [1, 2, 3], "finish_reason": "length"}]}
DERENDER_CHAT: Examples = {"plain": ("Three tokens", {"generate_response": _ANSWER, "chat_request": _CHAT})}
DERENDER_COMPLETION: Examples = {
    "plain": ("Three tokens", {"generate_responses": [_ANSWER], "completion_request": _TEXT})
}
_PAIR = {"queries": "Where is Paris?", "documents": ["Paris is in France.", "Cats purr."]}
SCORE: Examples = {"plain": ("Two documents", _PAIR)}
_PLACES = {"query": "Where is Paris?", "documents": ["Cats purr.", "Paris is in France."], "top_n": 1}
RERANK: Examples = {"plain": ("The better of two", _PLACES)}
