"""Meanings of request fields whose names do not explain them, and limits that are checked outside the request's model.

Used only by the OpenAPI document: looked up by a field's name, whichever request it is in.
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
    "max_tokens": "Output tokens at most. Default: 16; null, and in a chat: as many as the context has room for.",
    "max_completion_tokens": "Output tokens at most; takes the place of max_tokens.",
    "input": "A text, its token ids, or a list of either.",
    "dimensions": "Keep only so many of the first numbers, for models that were trained for it.",
    "encoding_format": "float (the default) writes numbers, base64 their bytes.",
    "normalize": "false leaves vectors as long as they are; otherwise their length is 1.",
    "use_activation": "false: as normalize, and for scores the difference of two logits instead of a probability.",
    "queries": "A query, or one for each document; other names: text_1, data_1.",
    "items": "Another name of the documents beside queries.",
    "instruction": "What the judging model is told to look for.",
    "top_n": "Answer with so many of the best; 0 and null: all.",
    "return_documents": "false leaves the texts out of the answer.",
    "min_tokens": "Output tokens before anything may end the answer.",
    "temperature": "0 takes the most likely token always. Default: the model's own, else 1.",
    "top_p": "Draw among the most likely tokens whose probabilities together reach this.",
    "top_k": "Draw among so many most likely tokens; -1 and 0: all.",
    "min_p": "Draw among tokens that are at least this share as likely as the most likely one.",
    "seed": "Requests with the same seed and parameters get the same tokens. Default, and -1: a new one each time.",
    "stop": "Texts that end the answer, which is cut before them.",
    "stop_token_ids": "Tokens that end the answer; a guided one where its guide accepts it.",
    "include_stop_str_in_output": "Leave the stop text in the answer.",
    "ignore_eos": "Go on when the model ends.",
    "n": "Answers to one prompt.",
    "best_of": "Generate so many and answer with the n likeliest; with use_beam_search its width.",
    "use_beam_search": "Search for the likeliest answers instead of drawing; needs n or best_of of at least 2.",
    "length_penalty": "Of a beam search: what the length's power is that sums of logprobs are divided by.",
    "early_stopping": "Of a beam search: whether it ends with the first best_of hypotheses.",
    "presence_penalty": "Taken from the logits of tokens that the answer has.",
    "frequency_penalty": "The same for each time that the answer has them.",
    "repetition_penalty": "Above 1: tokens that prompt or answer have become less likely.",
    "logit_bias": "Token id (as text) to what is added to its logit.",
    "bad_words": "Texts that are not written.",
    "allowed_token_ids": "Only these tokens are written.",
    "logprobs": "Tell the tokens' logprobs: true in a chat; elsewhere how many of the most likely ones "
    "beside each, -1: all.",
    "top_logprobs": "Most likely tokens to tell beside each token; needs logprobs: true.",
    "prompt_logprobs": "Most likely tokens to tell beside each token of the prompt; not with stream.",
    "logprob_token_ids": "Tell the logprobs of these tokens beside each token, not of the likeliest; needs logprobs.",
    "return_token_offsets": "A rendered prompt says where each token stands in the text; only on routes that render.",
    "enable_response_messages": "The response has prompt and output as text and token ids, too.",
    "output_mode": "text: choices have their text, and logprobs name tokens by theirs.",
    "max_tokens_per_query": "Cut each query behind so many tokens; 0: none.",
    "max_tokens_per_doc": "Cut each document behind so many tokens; 0: none.",
    "truncation_side": "What is cut off: left (the first tokens, the default) or right.",
    "task": "embed or classify. Default: what the model is for.",
    "label_token_ids": "Tokens whose probabilities to tell; the score is the first one's.",
    "item_first": "The query comes behind the item.",
    "input_type": "The name of a prompt of the model's, which is put in front of each text.",
    "embedding_types": "The forms of the vectors. Default: float.",
    "return_tokens_as_token_ids": 'Logprobs show a token as "token_id:5".',
    "return_token_ids": "Answers have the token ids of prompt and output, too.",
    "kv_transfer_params": "{do_remote_decode: true} asks for a handle for the KV cache of the prompt; {handle: …} "
    "takes it back. Only on the routes that generate from one prompt.",
    "prediction": 'Text that the answer is expected to have, such as a file before an edit: {"type": "content", '
    '"content": a text, or text parts}. It saves time where it is right, and never changes the answer.',
    "speculative": "false: draft nothing for this request; each token takes a step of its own.",
    "include_metrics": "Tell when the answer's tokens came; null for more than one answer in a request.",
    "echo": "The answer begins with the prompt; in a chat with the message that it goes on with.",
    "add_special_tokens": "Put the model's own tokens around the text, such as the one for a beginning.",
    "skip_special_tokens": "Leave such tokens out of the answer's text.",
    "truncate_prompt_tokens": "Keep so many of the prompt's last tokens; -1: as many as fit.",
    "stream": "Answer with an event for each new piece of text.",
    "stream_options": "include_usage (default: true): the usage comes last; continuous_usage_stats: with each event.",
    "cache_salt": "Requests with other salts do not share cached prompts with this one, nor can they time them. Those "
    "of other API keys do not in any case, unless the server says otherwise (--shared-prefix-cache).",
    "prompt_cache_key": "Names a session: its requests meet the same caches. The header x-session-id does so, too.",
    "session_id": "The same, under vLLM's name.",
    "priority": "Lower comes first; needs --scheduling-policy priority.",
    "request_id": "The answer's id ends in this. Default: the header X-Request-Id, else a new one.",
    "spaces_between_special_tokens": "false: special tokens that follow one another are shown without spaces.",
    "tools": "Functions that the answer may call; the chat template shows them to the model.",
    "tool_choice": "none, auto (the default; needs --tool-call-parser), required, a function by its name, or "
    "allowed_tools: some of the tools, with auto or required.",
    "parallel_tool_calls": "false: one call at most.",
    "include_reasoning": "false: leave out what a reasoning model writes before its answer; token_ids and logprobs "
    "then have the content's tokens alone.",
    "thinking_token_budget": "Tokens of reasoning at most; then the model goes on to its answer. Needs a reasoning "
    "parser.",
    "reasoning_effort": "For models whose chat template knows it, else without effect; none switches thinking off.",
    "add_generation_prompt": "End the prompt where an answer begins. Default: true, unless the last message goes on.",
    "continue_final_message": "The answer goes on where the last message ends.",
    "documents": "Texts to be judged; in a chat, texts for templates that have a place for them.",
    "chat_template": "A template for this request; needs --trust-request-chat-template.",
    "chat_template_kwargs": "Further variables of the chat template, such as enable_thinking.",
    "user": "Accepted, and not used.",
    "response_format": 'OpenAI\'s: {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": …}}.',
    "structured_outputs": "vLLM's: one of json, regex, choice, grammar, json_object, structural_tag.",
    "guided_json": "The answer follows this JSON schema.",
    "guided_regex": "The answer matches this regular expression.",
    "guided_choice": "The answer is one of these.",
    "guided_grammar": "The answer follows this grammar: EBNF, as Lark or GBNF write it.",
    "guided_decoding_backend": "auto, or a library as vLLM names them; llguidance does it in any case.",
    "guided_whitespace_pattern": "A regular expression for the space between the parts of JSON.",
    "return_token_strs": "Tell each token's text, too.",
    "tokens": "Token ids.",
    "token_ids": "The prompt.",
    "sampling_params": "Those of a completion, such as temperature, max_tokens, stop_token_ids, logprobs (a number) "
    "and structured_outputs. Default of max_tokens: as many as the context has room for.",
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
