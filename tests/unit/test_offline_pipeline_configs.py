"""LMDeploy's configuration classes: documented fields and defaults, and what each becomes here or is refused with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pd_cluster import messages, pytorch, turbomind
from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.messages import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig
from pd_cluster.offline.lmdeploy.engine_configs import engine_of, naming_of
from pd_cluster.offline.lmdeploy.messages import request_of
from pd_cluster.offline.lmdeploy.templates import BUILT_IN, ChatTemplateConfig, way_of
from pd_cluster.settings.engine import SHIPPED_MODEL
from pd_cluster.text.chat_template import ChatTemplate
from pd_cluster.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_tokenizer

EARLY_PYTORCH = {
    "model_name": "",
    "tp": 1,
    "session_len": None,
    "max_batch_size": 128,
    "eviction_type": "recompute",
    "prefill_interval": 16,
    "block_size": 64,
    "num_cpu_blocks": 0,
    "num_gpu_blocks": 0,
}
EARLY_TURBOMIND = {
    "model_name": None,
    "model_format": None,
    "group_size": 128,
    "tp": 1,
    "session_len": None,
    "max_batch_size": 128,
    "max_context_token_num": 1,
    "cache_max_entry_count": 0.5,
    "cache_block_seq_len": 128,
    "cache_chunk_size": -1,
    "num_tokens_per_iter": 0,
    "max_prefill_iters": 1,
    "use_context_fmha": 1,
    "quant_policy": 0,
    "rope_scaling_factor": 0.0,
    "use_dynamic_ntk": False,
    "use_logn_attn": False,
    "kv_bits": 8,
}
TURBOMIND = {
    "model_name": None,
    "model_format": None,
    "tp": 1,
    "session_len": None,
    "max_batch_size": 128,
    "cache_max_entry_count": 0.5,
    "quant_policy": 0,
    "rope_scaling_factor": 0.0,
    "use_logn_attn": False,
}
GENERATION = {
    "n": 1,
    "max_new_tokens": 512,
    "top_p": 1.0,
    "top_k": 1,
    "temperature": 0.8,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "random_seed": None,
    "stop_words": None,
    "bad_words": None,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    ("kind", "documented"),
    [
        (pytorch.EngineConfig, EARLY_PYTORCH),
        (turbomind.EngineConfig, EARLY_TURBOMIND),
        (TurbomindEngineConfig, TURBOMIND),
        (PytorchEngineConfig, {**EARLY_PYTORCH, "adapters": None}),
        (messages.GenerationConfig, GENERATION),
    ],
)
def test_documented_fields_come_first_with_their_defaults(kind: Any, documented: dict[str, Any]) -> None:
    fields = dataclasses.fields(kind)
    assert [field.name for field in fields][: len(documented)] == list(documented)
    assert {name: getattr(kind(), name) for name in documented} == documented
    assert kind(*documented.values()) == kind()


@pytest.mark.parametrize("kind", [pytorch.EngineConfig, turbomind.EngineConfig, GenerationConfig, ChatTemplateConfig])
def test_an_unknown_field_names_the_nearest_one(kind: Any) -> None:
    known = dataclasses.fields(kind)[2].name
    with pytest.raises(ConfigError, match=f"{known}x is unknown; did you mean {known}?"):
        kind(**{f"{known}x": 1})


# ---- engines


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (TurbomindEngineConfig(tp=2), "tensor_parallel_size", 2),
        (PytorchEngineConfig(tp=2), "tensor_parallel_size", 2),
        (turbomind.EngineConfig(session_len=1024), "max_model_len", 1024),
        (PytorchEngineConfig(session_len=2024), "max_model_len", 2024),
        (PytorchEngineConfig(), "max_model_len", None),
        (TurbomindEngineConfig(), "max_num_seqs", 128),
        (PytorchEngineConfig(max_batch_size=7), "max_num_seqs", 7),
        (PytorchEngineConfig(), "block_size", 64),
        (turbomind.EngineConfig(), "block_size", 128),
        (turbomind.EngineConfig(cache_block_seq_len=32), "block_size", 32),
        (TurbomindEngineConfig(cache_max_entry_count=0.2), "gpu_memory_utilization", 0.2),
        (TurbomindEngineConfig(), "gpu_memory_utilization", 0.5),
        (PytorchEngineConfig(num_gpu_blocks=99), "num_blocks", 99),
        (PytorchEngineConfig(num_gpu_blocks=99), "gpu_memory_utilization", None),
        (PytorchEngineConfig(), "num_blocks", None),
        (PytorchEngineConfig(eviction_type="recompute"), "preemption_mode", "recompute"),
        (PytorchEngineConfig(eviction_type="copy"), "preemption_mode", "swap"),
        (turbomind.EngineConfig(max_context_token_num=512), "max_num_batched_tokens", 512),
        (turbomind.EngineConfig(num_tokens_per_iter=256), "max_num_batched_tokens", 256),
        (PytorchEngineConfig(max_prefill_token_num=300), "max_num_batched_tokens", 300),
        (turbomind.EngineConfig(), "max_num_batched_tokens", None),
        (PytorchEngineConfig(enable_prefix_caching=False), "enable_prefix_caching", False),
        (TurbomindEngineConfig(dtype="bfloat16"), "dtype", "bfloat16"),
        (TurbomindEngineConfig(), "kv_cache_dtype", "auto"),
        (turbomind.EngineConfig(quant_policy=4), "kv_cache_dtype", "int8"),
        (turbomind.EngineConfig(quant_policy=4, kv_bits=8), "kv_cache_dtype", "int8"),
        (TurbomindEngineConfig(quant_policy=4, kv_bits=4), "kv_cache_dtype", "int4"),
        (PytorchEngineConfig(quant_policy=8), "kv_cache_dtype", "int8"),
        (TurbomindEngineConfig(quant_policy=16), "kv_cache_dtype", "fp8_e4m3"),
        (TurbomindEngineConfig(model_format="awq"), "quantization", "awq"),
    ],
)
def test_a_field_becomes_the_engines(config: Any, field: str, value: Any) -> None:
    engine = engine_of("/models/x", config)
    assert getattr(engine.config, field) == value
    assert engine.remarks == []


def test_blocks_on_the_host_are_room_to_swap_to() -> None:
    config = PytorchEngineConfig(eviction_type="copy", num_cpu_blocks=4)
    engine = engine_of(str(SHIPPED_MODEL), config).config
    block_nbytes = 2 * 4 * 4 * 32 * 64 * 4  # keys and values, layers, heads, head_dim, tokens, float32
    assert engine.swap_space_gib == 4 * block_nbytes / 2**30


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (PytorchEngineConfig(prefill_interval=4), "prefill_interval=4"),
        (turbomind.EngineConfig(cache_chunk_size=8), "cache_chunk_size=8"),
        (turbomind.EngineConfig(max_prefill_iters=3), "max_prefill_iters=3"),
        (turbomind.EngineConfig(use_context_fmha=0), "use_context_fmha=0"),
        (turbomind.EngineConfig(group_size=64), "group_size=64"),
        (TurbomindEngineConfig(model_format="llama"), "model_format='llama'"),
    ],
)
def test_what_cannot_matter_is_told(config: Any, told: str) -> None:
    (remark,) = engine_of("/models/x", config).remarks
    assert remark.startswith(f"{told} (")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (turbomind.EngineConfig(quant_policy=17), "EngineConfig.quant_policy 17: expected 0"),
        (turbomind.EngineConfig(kv_bits=2), "kv_bits 2: the KV cache has codes of 4 or 8 bits"),
        (turbomind.EngineConfig(model_format="int4"), "model_format 'int4': "),
        (TurbomindEngineConfig(model_format="int4"), "model_format 'int4': "),
        (turbomind.EngineConfig(kv_bits=4, quant_policy=8), "EngineConfig.kv_bits 4: only with quant_policy=4"),
        (TurbomindEngineConfig(use_logn_attn=None), "use_logn_attn None: must be True or False"),
        (PytorchEngineConfig(adapters={"a": 5}), "PytorchEngineConfig.adapters .*: expected a dict from names"),
        (PytorchEngineConfig(eviction_type="swap"), "eviction_type 'swap': expected recompute or copy"),
        (PytorchEngineConfig(max_batch_size="8"), "max_batch_size '8': must be a whole number"),
        (TurbomindEngineConfig(cache_max_entry_count=1.5), "cache_max_entry_count 1.5: must be a share"),
        (TurbomindEngineConfig(enable_prefix_caching="no"), "enable_prefix_caching 'no': must be True or False"),
    ],
)
def test_what_is_not_here_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of("/models/x", config)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (TurbomindEngineConfig(), {}),
        (TurbomindEngineConfig(rope_scaling_factor=2), {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        (turbomind.EngineConfig(use_dynamic_ntk=True), {"rope_scaling": {"rope_type": "dynamic"}}),
        (turbomind.EngineConfig(use_logn_attn=True), {"use_logn_attn": True}),
    ],
)
def test_fields_of_positions_replace_config_json_s(config: Any, overrides: dict[str, Any]) -> None:
    assert engine_of("/models/x", config).config.hf_overrides == overrides


@pytest.mark.parametrize("config", [PytorchEngineConfig, TurbomindEngineConfig])
def test_a_hub_s_revision_and_where_it_is_kept(config: Any) -> None:
    engine = engine_of("a/b", config(revision="v2", download_dir="/x")).config
    assert (engine.model, engine.revision, engine.download_dir) == ("a/b", "v2", "/x")


@pytest.mark.parametrize("model_format", [None, "hf"])
def test_hugging_face_weights_are_the_format(model_format: str | None) -> None:
    assert engine_of("/models/x", TurbomindEngineConfig(model_format=model_format)).remarks == []


# ---- generation


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({}, "max_tokens", 512),
        ({"max_new_tokens": 7}, "max_tokens", 7),
        ({"max_new_tokens": None}, "wants_all_room", True),
        ({"top_k": 40}, "top_k", 40),
        ({"top_k": 40}, "temperature", 0.8),
        ({"top_k": 40, "temperature": 0.5}, "temperature", 0.5),
        ({"top_k": 0}, "top_k", 0),
        ({}, "temperature", 0.0),  # top_k 1: the most likely token
        ({"top_k": 40, "do_sample": False}, "temperature", 0.0),
        ({"top_k": 40, "do_sample": True}, "temperature", 0.8),
        ({"top_p": 0.8}, "top_p", 0.8),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"repetition_penalty": 1.02}, "repetition_penalty", 1.02),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"random_seed": 5}, "seed", 5),
        ({"stop_words": ["end", "fin"]}, "stop", ["end", "fin"]),
        ({"bad_words": ["no"]}, "bad_words", ["no"]),
        ({"stop_token_ids": [4]}, "stop_token_ids", [4]),
        ({"bad_token_ids": [4]}, "logit_bias", {"4": -math.inf}),
        ({"min_new_tokens": 3}, "min_tokens", 3),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", False),
        ({"logprobs": 2}, "logprobs", 2),
        ({"response_format": {"type": "json_object"}}, "response_format", {"type": "json_object"}),
        (
            {"response_format": {"type": "regex_schema", "regex_schema": "a+"}},
            "structured_outputs",
            {"regex": "a+"},
        ),
    ],
)
def test_a_field_of_generation_becomes_the_apis(
    tokenizer: Tokenizer, given: dict[str, Any], field: str, value: Any
) -> None:
    assert getattr(request_of(GenerationConfig(**given), tokenizer), field) == value


def test_sampling_with_top_k_one_says_that_it_is_none(tokenizer: Tokenizer) -> None:
    with pytest.warns(UserWarning, match="do_sample=True changes nothing with top_k 1"):
        assert request_of(GenerationConfig(do_sample=True), tokenizer).temperature == 0.0


def test_a_stop_word_that_is_a_special_token_ends_the_answer_by_its_id() -> None:
    tokenizer = Tokenizer(SHIPPED_MODEL)
    request = request_of(GenerationConfig(stop_words=["<|im_end|>", "stop"]), tokenizer, ("<|im_start|>",))
    assert request.stop == ["stop"]
    assert request.stop_token_ids == [
        *tokenizer.encode("<|im_end|>", False),
        *tokenizer.encode("<|im_start|>", False),
    ]


def test_ignore_eos_goes_beyond_the_ends_of_answers_that_a_template_knows(tokenizer: Tokenizer) -> None:
    asked = GenerationConfig(stop_words=["x"])
    assert request_of(asked, tokenizer, ("there",)).stop == ["x", "there"]
    assert request_of(dataclasses.replace(asked, ignore_eos=True), tokenizer, ("there",)).stop == ["x"]


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"n": 0}, "n", "^n: 0"),
        ({"top_p": 1.5}, "top_p", "^top_p: 1.5"),
        ({"temperature": -1.0, "top_k": 5}, "temperature", "^temperature: -1"),
        ({"response_format": "json"}, "response_format", "^response_format: 'json' must be a dict"),
        ({"temperature": math.nan, "top_k": 5}, "temperature", "^temperature: nan"),
        ({"stop_words": [""]}, "stop_words", "^stop_words: an empty string"),
        ({"bad_token_ids": [-1]}, "bad_token_ids", "^bad_token_ids: '-1' is not a token id"),
        ({"min_new_tokens": -1}, "min_new_tokens", "^min_new_tokens: -1"),
        ({"response_format": {"type": "what"}}, "response_format", "response_format"),
    ],
)
def test_a_wrong_value_is_refused_under_its_name_here(
    tokenizer: Tokenizer, given: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        request_of(GenerationConfig(**given), tokenizer)
    assert caught.value.param == param


# ---- chat templates

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
SYSTEM = {"role": "system", "content": "s"}


def rendered(config: ChatTemplateConfig, messages: list[dict[str, Any]]) -> str:
    template = way_of(config).template
    assert template is not None
    return template.render(messages)


@pytest.mark.parametrize(
    ("name", "plain", "with_system"),
    [
        (
            "llama2",
            "[INST] a [/INST] b</s><s>[INST] c [/INST] ",
            "[INST] <<SYS>>\ns\n<</SYS>>\n\na [/INST] b</s><s>[INST] c [/INST] ",
        ),
        (
            "internlm-chat-7b",
            "<|User|>:a\n<|Bot|>:b<eoa>\n<|User|>:c\n<|Bot|>:",
            "<|System|>:s\n<|User|>:a\n<|Bot|>:b<eoa>\n<|User|>:c\n<|Bot|>:",
        ),
        (
            "vicuna",
            "USER: a ASSISTANT: b</s>USER: c ASSISTANT: ",
            "s USER: a ASSISTANT: b</s>USER: c ASSISTANT: ",
        ),
    ],
)
def test_a_built_in_template(name: str, plain: str, with_system: str) -> None:
    assert rendered(ChatTemplateConfig(name), TALK) == plain
    assert rendered(ChatTemplateConfig(name), [SYSTEM, *TALK]) == with_system


@pytest.mark.parametrize("name", ["chatml", "internlm2-chat-7b", "yi"])
def test_chatml_is_as_the_shipped_models_own_template(name: str) -> None:
    own = Tokenizer(SHIPPED_MODEL).template
    assert own is not None
    for talk in (TALK, [SYSTEM, *TALK]):
        assert rendered(ChatTemplateConfig(name), talk) == own.render(talk)


def test_qwens_system_prompt_is_there_unless_another_is_given() -> None:
    start = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\na"
    assert rendered(ChatTemplateConfig("qwen-7b"), TALK).startswith(start)
    assert rendered(ChatTemplateConfig("qwen-7b"), [SYSTEM, *TALK]).startswith("<|im_start|>system\ns<|im_end|>")


def test_given_marks_take_the_place_of_the_built_in_ones() -> None:
    config = ChatTemplateConfig("internlm-chat-7b", meta_instruction='Be {{ kind }} "now" \\ 书.', eoh="!\n")
    assert rendered(config, TALK[:1]) == '<|System|>:Be {{ kind }} "now" \\ 书.\n<|User|>:a!\n<|Bot|>:'


@pytest.mark.parametrize("separator", ["separator", "stop_word_suffix"])
def test_marks_by_themselves_make_a_template(separator: str) -> None:
    config = ChatTemplateConfig(user="Q:", eoh=";", assistant="A:", eoa=".", **{separator: "\n"})
    assert rendered(config, TALK) == "Q:a;A:b.\nQ:c;A:"
    with pytest.raises(RequestError, match="the role tool has no place in it"):
        rendered(config, [{"role": "tool", "content": "x"}])


def test_completion_takes_texts_as_they_are() -> None:
    assert way_of(ChatTemplateConfig("base")).is_plain
    assert way_of(ChatTemplateConfig("llama2", capability="completion")).is_plain


def test_stop_words_of_a_template() -> None:
    assert way_of(ChatTemplateConfig("internlm-chat-7b")).stop_words == ("<eoa>",)
    assert way_of(ChatTemplateConfig("internlm-chat-7b", stop_words=["x"])).stop_words == ("x",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_name": "lama2"}, "model_name 'lama2': no chat template is known by that name; there are base"),
        ({"user": 5}, "ChatTemplateConfig.user 5: must be a text"),
        ({"model_name": "base", "stop_words": "x"}, "stop_words 'x': must be a list of texts"),
        ({"model_name": "base", "stop_words": [5]}, r"stop_words \[5\]: must be a list of texts"),
        ({"model_name": "mine", "stop_words": ["x"]}, "model_name 'mine': no chat template is known by that name"),
    ],
)
def test_a_wrong_template_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        way_of(ChatTemplateConfig(**fields))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_template_compiles(name: str) -> None:
    way = way_of(ChatTemplateConfig(name))
    assert way.is_plain or isinstance(way.template, ChatTemplate)


def test_an_error_of_the_engine_s_has_the_fields_names() -> None:
    settings = ("max_num_seqs", "block_size", "attention_backend")
    early = [naming_of(turbomind.EngineConfig())(setting) for setting in settings]
    assert early == ["max_batch_size", "cache_block_seq_len", "--attention-backend"]
    assert naming_of(PytorchEngineConfig())("block_size") == "block_size"
