"""Descriptions of request fields with names that do not explain themselves, and limits that the schemas do not check.

Only the OpenAPI document uses them. A description applies to every request that has a field of this name.
"""

from __future__ import annotations

from typing import Any

from pd_cluster.service.schema.completion_protocol import MAX_STOP_STRINGS
from pd_cluster.service.schema.structured_outputs.guide_fields import MAX_WHITESPACE_NUM_CHARS
from pd_cluster.types import MAX_GUIDE_NUM_CHARS

DESCRIPTIONS = {
    "model": "One of the names in /v1/models; default: the first, unless the server requires it.",
    "messages": "The conversation so far, oldest first. Parts: text, and image_url if the model takes it.",
    "prompt": "A text, its token ids, or a list of either.",
    "max_tokens": "Maximum number of output tokens. Default in a chat: as many as fit; otherwise 16.",
    "max_completion_tokens": "Maximum number of output tokens; replaces max_tokens.",
    "input": "A text, its token ids, or a list of either.",
    "dimensions": "Keep only this many of a vector's first values, for models that were trained for it.",
    "encoding_format": "float (the default) writes numbers, base64 their bytes.",
    "normalize": "false keeps the length of vectors; otherwise their length is 1.",
    "use_activation": "For vectors: as normalize. For classes and scores: false gives logits, not probabilities.",
    "queries": "A query, or one for each document; other names: text_1, data_1.",
    "items": "Another name for documents, together with queries.",
    "instruction": "The instruction for a reranking model.",
    "top_n": "Return only this many best documents; 0 and null: all.",
    "return_documents": "false leaves the texts out of the answer.",
    "min_tokens": "The number of output tokens before a stop may end the answer.",
    "temperature": "0 always chooses the most likely token. Default: the model's own, otherwise 1.",
    "top_p": "Sample from the most likely tokens whose probabilities sum up to this.",
    "top_k": "Sample from this many most likely tokens; -1 and 0: all.",
    "min_p": "Sample from tokens whose probability is at least this share of the most likely token's.",
    "seed": "Requests with the same seed and parameters get the same tokens. Default, and -1: a random seed.",
    "stop": "Texts that end the answer, which is cut before them.",
    "stop_token_ids": "Tokens that end the answer; with a guide, only where the guide allows an end.",
    "include_stop_str_in_output": "Keep the stop text in the answer.",
    "ignore_eos": "Continue after the model's end-of-sequence token.",
    "n": "The number of answers to one prompt.",
    "best_of": "Generate this many sequences and return the n likeliest; with use_beam_search, the beam width.",
    "use_beam_search": "Search for the likeliest answers instead of sampling; needs n or best_of of at least 2.",
    "length_penalty": "A beam search divides sums of logprobs by the length to the power of this.",
    "early_stopping": "Whether a beam search ends as soon as it has best_of answers.",
    "presence_penalty": "Subtracted from the logits of tokens that the answer contains.",
    "frequency_penalty": "Subtracted from a token's logit for each time that the answer contains the token.",
    "repetition_penalty": "Above 1, makes tokens that the prompt or the answer contains less likely.",
    "logit_bias": "Token id (as text) -> value that is added to its logit.",
    "bad_words": "Texts that the answer must not contain.",
    "allowed_token_ids": "The only tokens that the answer may contain.",
    "logprobs": "Return the tokens' logprobs: true in a chat; elsewhere the number of most likely tokens "
    "to return with each token, -1: all.",
    "top_logprobs": "Number of most likely tokens to return with each token; needs logprobs: true.",
    "prompt_logprobs": "Number of most likely tokens to return with each token of the prompt; not with stream.",
    "logprob_token_ids": "With each token, return the logprobs of these tokens instead of the "
    "likeliest ones; needs logprobs.",
    "return_token_offsets": "Return the position of each token in the text; only on routes that render a prompt.",
    "enable_response_messages": "Also return the prompt and the output as text and token ids.",
    "output_mode": "text: choices contain text, and logprobs name tokens by their text.",
    "max_tokens_per_query": "Maximum number of tokens of each query; the rest is cut off. 0: no limit.",
    "max_tokens_per_doc": "Maximum number of tokens of each document; the rest is cut off. 0: no limit.",
    "truncation_side": "The side that is cut off: left (the first tokens, the default) or right.",
    "task": "embed or classify. Default: the task of the model.",
    "label_token_ids": "Tokens whose probabilities are returned; the score is that of the first.",
    "item_first": "Put the query after the item.",
    "input_type": "The name of one of the model's prompts, which is put before each text.",
    "embedding_types": "The encodings of the vectors. Default: float.",
    "return_tokens_as_token_ids": 'Logprobs show a token as "token_id:5".',
    "return_weight_versions": "Return which version of the weights computed which output tokens.",
    "return_token_ids": "Return the token ids of prompt and output, too.",
    "kv_transfer_params": "{do_remote_decode: true} asks for a handle for the KV cache of the prompt; {handle: …} "
    "takes it back. Only on the routes that generate from one prompt.",
    "prediction": 'The expected text of the answer, such as a file before an edit: {"type": "content", '
    '"content": a text, or text parts}. It saves time where it is right, and does not change the answer.',
    "speculative": "false: no drafts for this request; each token takes a separate step.",
    "include_metrics": "Return the times of the answer's tokens; null for more than one answer.",
    "echo": "The answer begins with the prompt, in a chat with the message that it continues.",
    "add_special_tokens": "Add the model's special tokens to the text, such as the beginning-of-sequence token.",
    "skip_special_tokens": "Leave special tokens out of the answer's text.",
    "truncate_prompt_tokens": "Keep this many of the prompt's last tokens; -1: as many as fit.",
    "stream": "Answer with an event for each new piece of text.",
    "stream_options": "include_usage (default, if stream_options is given): the last event has usage; "
    "continuous_usage_stats: each event has it.",
    "cache_salt": "Only requests with the same salt share cached prompts with this one, or can detect them by timing. "
    "Requests of other API keys never do, unless the server is started with --shared-prefix-cache.",
    "prompt_cache_key": "Names a session: its requests go to the same caches, as with the header x-session-id.",
    "prompt_cache_retention": "5m, 1h or 24h: cached prompts are kept longer than others, within the server's "
    "--prefix-retention and the API key's share. in_memory: as long as there is space.",
    "session_id": "prompt_cache_key, under vLLM's name.",
    "priority": "Lower comes first; needs --scheduling-policy priority.",
    "request_id": "The answer's id ends in this. Default: the header X-Request-Id, otherwise a new id.",
    "spaces_between_special_tokens": "false: adjacent special tokens are shown without spaces between them.",
    "tools": "Functions that the answer may call; the chat template shows them to the model.",
    "tool_choice": "none, auto (the default; needs a parser, see --tool-call-parser), required, a function by its "
    "name, or allowed_tools: some of the tools, with auto or required.",
    "parallel_tool_calls": "false: at most one call.",
    "include_reasoning": "false: leave out what a reasoning model writes before its answer; token_ids and logprobs "
    "then have the content's tokens alone.",
    "thinking_token_budget": "Maximum number of reasoning tokens; then the model continues with its answer. Needs a "
    "reasoning parser.",
    "reasoning_effort": "For models whose chat template uses it, otherwise without effect; none switches thinking off.",
    "add_generation_prompt": "End the prompt with the beginning of an answer. Default: true, except with "
    "continue_final_message.",
    "continue_final_message": "The answer continues the last message.",
    "documents": "Texts to be scored; in a chat, texts for templates that use documents.",
    "chat_template": "A template for this request; needs --trust-request-chat-template.",
    "chat_template_kwargs": "Further variables of the chat template, such as enable_thinking.",
    "user": "Accepted without effect.",
    "response_format": 'OpenAI\'s: {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": …}}.',
    "structured_outputs": "vLLM's: one of json, regex, choice, grammar, json_object, structural_tag.",
    "guided_json": "The answer follows this JSON schema.",
    "guided_regex": "The answer matches this regular expression.",
    "guided_choice": "The answer is one of these texts.",
    "guided_grammar": "The answer follows this grammar: EBNF, as Lark or GBNF write it.",
    "guided_decoding_backend": "auto, or vLLM's name of a library; llguidance is always used.",
    "guided_whitespace_pattern": "A regular expression for the whitespace between the parts of JSON.",
    "return_token_strs": "Return each token's text, too.",
    "tokens": "Token ids.",
    "token_ids": "The prompt.",
    "sampling_params": "Parameters of a completion, such as temperature, max_tokens, stop_token_ids, logprobs "
    "(a number) and structured_outputs. Default of max_tokens: as many as fit the context.",
}

# field -> its allowed types -> keywords of that type's schema
LIMITS: dict[str, dict[str, dict[str, Any]]] = {
    "stop": {"string": {"minLength": 1}, "array": {"maxItems": MAX_STOP_STRINGS}},
    "guided_json": {"string": {"maxLength": 2 * MAX_GUIDE_NUM_CHARS}},
    "guided_regex": {"string": {"minLength": 1, "maxLength": MAX_GUIDE_NUM_CHARS}},
    "guided_grammar": {"string": {"minLength": 1, "maxLength": MAX_GUIDE_NUM_CHARS}},
    "guided_choice": {"array": {"minItems": 1}},
    "guided_whitespace_pattern": {"string": {"maxLength": MAX_WHITESPACE_NUM_CHARS}},
}
