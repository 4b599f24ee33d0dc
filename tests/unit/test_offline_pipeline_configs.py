"""LMDeploy's configuration classes: documented fields and defaults, and each field's meaning or refusal here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pd_cluster import messages, pytorch, turbomind
from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.extras.lmdeploy.engine_configs import engine_of, naming_of
from pd_cluster.extras.lmdeploy.generation_config import request_of
from pd_cluster.extras.lmdeploy.prompt_templates import BUILT_IN, ChatTemplateConfig, way_of
from pd_cluster.messages import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.text.chat_template import ChatTemplate
from pd_cluster.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_tokenizer

EARLY_PYTORCH = (
    "model_name='', tp=1, session_len=None, max_batch_size=128, eviction_type='recompute', prefill_interval=16, "
    "block_size=64, num_cpu_blocks=0, num_gpu_blocks=0"
)
EARLY_TURBOMIND = (
    "model_name=None, model_format=None, group_size=128, tp=1, session_len=None, max_batch_size=128, "
    "max_context_token_num=1, cache_max_entry_count=0.5, cache_block_seq_len=128, cache_chunk_size=-1, "
    "num_tokens_per_iter=0, max_prefill_iters=1, use_context_fmha=1, quant_policy=0, rope_scaling_factor=0.0, "
    "use_dynamic_ntk=False, use_logn_attn=False, kv_bits=8"
)
TURBOMIND = (
    "model_name=None, model_format=None, tp=1, session_len=None, max_batch_size=128, cache_max_entry_count=0.5, "
    "quant_policy=0, rope_scaling_factor=0.0, use_logn_attn=False"
)
GENERATION = (
    "n=1, max_new_tokens=512, top_p=1.0, top_k=1, temperature=0.8, repetition_penalty=1.0, ignore_eos=False, "
    "random_seed=None, stop_words=None, bad_words=None"
)


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
        (PytorchEngineConfig, f"{EARLY_PYTORCH}, adapters=None"),
        (messages.GenerationConfig, GENERATION),
    ],
)
def test_documented_fields_come_first_with_their_defaults(kind: Any, documented: str) -> None:
    positional = {each.name: getattr(kind(), each.name) for each in dataclasses.fields(kind) if not each.kw_only}
    assert ", ".join(f"{name}={value!r}" for name, value in positional.items()).startswith(documented)
    assert kind(*positional.values()) == kind()


def test_an_unknown_field_names_the_nearest_one() -> None:
    kinds: list[Any] = [pytorch.EngineConfig, GenerationConfig, ChatTemplateConfig]
    for kind in kinds:
        known = dataclasses.fields(kind)[2].name
        with pytest.raises(ConfigError, match=f"{known}x is unknown; did you mean {known}?"):
            kind(**{f"{known}x": 1})


# ---- engines


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            PytorchEngineConfig(tp=2, session_len=2024, max_batch_size=7, eviction_type="copy"),
            {"tensor_parallel_size": 2, "max_model_len": 2024, "max_num_seqs": 7, "preemption_mode": "swap"},
        ),
        (
            PytorchEngineConfig(dp=2, tp=2, ep=4),
            {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
        ),
        (
            PytorchEngineConfig(num_gpu_blocks=99, max_prefill_token_num=300),
            {"num_blocks": 99, "gpu_memory_utilization": None, "max_num_batched_tokens": 300, "block_size": 64},
        ),
        (
            PytorchEngineConfig(quant_policy=8, enable_prefix_caching=False),
            {"kv_cache_dtype": "int8", "enable_prefix_caching": False},
        ),
        (PytorchEngineConfig(), {"max_model_len": None, "num_blocks": None, "preemption_mode": "recompute"}),
        (
            turbomind.EngineConfig(session_len=1024, cache_block_seq_len=32, max_context_token_num=512),
            {"max_model_len": 1024, "block_size": 32, "max_num_batched_tokens": 512},
        ),
        (turbomind.EngineConfig(), {"block_size": 128, "max_num_batched_tokens": None}),
        (
            turbomind.EngineConfig(num_tokens_per_iter=256, quant_policy=4),
            {"max_num_batched_tokens": 256, "kv_cache_dtype": "int8"},
        ),
        (
            TurbomindEngineConfig(tp=2, cache_max_entry_count=0.2, dtype="bfloat16", model_format="awq"),
            {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.2, "dtype": "bfloat16", "quantization": "awq"},
        ),
        (
            TurbomindEngineConfig(model_format="hf"),
            {"max_num_seqs": 128, "gpu_memory_utilization": 0.5, "kv_cache_dtype": "auto"},
        ),
        (TurbomindEngineConfig(quant_policy=4, kv_bits=4), {"kv_cache_dtype": "int4"}),
        (TurbomindEngineConfig(quant_policy=16), {"kv_cache_dtype": "fp8_e4m3"}),
    ],
)
def test_a_field_becomes_the_engines(config: Any, expected: dict[str, Any]) -> None:
    engine = engine_of("/models/x", config)
    assert {name: getattr(engine.config, name) for name in expected} == expected
    assert engine.remarks == []


def test_blocks_and_folders_of_the_engine() -> None:
    config = PytorchEngineConfig(eviction_type="copy", num_cpu_blocks=4)
    engine = engine_of(str(SHIPPED_MODEL), config).config
    block_nbytes = 2 * 4 * 4 * 32 * 64 * 4  # keys and values, layers, heads, head_dim, tokens, float32
    assert engine.swap_space_gib == 4 * block_nbytes / 2**30
    for kind in (PytorchEngineConfig, TurbomindEngineConfig):
        engine = engine_of("a/b", kind(revision="v2", download_dir="/x")).config
        assert (engine.model, engine.revision, engine.download_dir) == ("a/b", "v2", "/x")


def test_what_cannot_matter_is_told() -> None:
    for config, told in (
        (PytorchEngineConfig(prefill_interval=4), "prefill_interval=4"),
        (turbomind.EngineConfig(use_context_fmha=0), "use_context_fmha=0"),
        (TurbomindEngineConfig(model_format="llama"), "model_format='llama'"),
    ):
        (remark,) = engine_of("/models/x", config).remarks
        assert remark.startswith(f"{told} (")


def test_what_is_not_here_is_refused_by_name() -> None:
    wrong: list[tuple[Any, str]] = [
        (turbomind.EngineConfig(quant_policy=17), "EngineConfig.quant_policy 17: "),
        (turbomind.EngineConfig(kv_bits=2), "kv_bits 2: "),
        (TurbomindEngineConfig(model_format="int4"), "model_format 'int4': "),
        (turbomind.EngineConfig(kv_bits=4, quant_policy=8), "EngineConfig.kv_bits 4: only with quant_policy=4"),
        (TurbomindEngineConfig(use_logn_attn=None), "use_logn_attn None: "),  # type: ignore[arg-type]
        (PytorchEngineConfig(adapters={"a": 5}), "PytorchEngineConfig.adapters "),  # type: ignore[dict-item]
        (PytorchEngineConfig(eviction_type="swap"), "eviction_type 'swap': "),
        (PytorchEngineConfig(max_batch_size="8"), "max_batch_size '8': "),  # type: ignore[arg-type]
        (TurbomindEngineConfig(cache_max_entry_count=1.5), "cache_max_entry_count 1.5: "),
        (PytorchEngineConfig(dp=2, tp=2, ep=2), "ep 2: .* dp 2 times tp 2; give 4, or 1"),
    ]
    for config, message in wrong:
        with pytest.raises(ConfigError, match=message):
            engine_of("/models/x", config)


def test_fields_of_positions_replace_config_json_s() -> None:
    for config, overrides in (
        (TurbomindEngineConfig(), {}),
        (TurbomindEngineConfig(rope_scaling_factor=2), {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        (turbomind.EngineConfig(use_dynamic_ntk=True), {"rope_scaling": {"rope_type": "dynamic"}}),
        (turbomind.EngineConfig(use_logn_attn=True), {"use_logn_attn": True}),
    ):
        assert engine_of("/models/x", config).config.hf_overrides == overrides


# ---- generation


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_tokens": 512, "temperature": 0.0}),  # top_k 1: the most likely token
        ({"max_new_tokens": None}, {"wants_whole_context": True}),
        ({"top_k": 40}, {"top_k": 40, "temperature": 0.8}),
        ({"top_k": 0, "temperature": 0.5}, {"top_k": 0, "temperature": 0.5}),
        ({"top_k": 40, "do_sample": False}, {"temperature": 0.0}),
        ({"top_k": 40, "do_sample": True}, {"temperature": 0.8}),
        (
            {"random_seed": 5, "max_new_tokens": 7, "stop_words": ["end"], "min_new_tokens": 3, "bad_token_ids": [4]},
            {"seed": 5, "max_tokens": 7, "stop": ["end"], "min_tokens": 3, "logit_bias": {"4": -math.inf}},
        ),
        ({"response_format": {"type": "regex_schema", "regex_schema": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        *(
            ({name: value}, {name: value})
            for name, value in (
                *(("top_p", 0.8), ("min_p", 0.1), ("repetition_penalty", 1.02), ("ignore_eos", True), ("logprobs", 2)),
                *(("bad_words", ["no"]), ("stop_token_ids", [4]), ("response_format", {"type": "json_object"})),
                *(("skip_special_tokens", False), ("spaces_between_special_tokens", False)),
            )
        ),
    ],
)
def test_a_field_of_generation_becomes_the_apis(
    tokenizer: Tokenizer, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = request_of(GenerationConfig(**given), tokenizer)
    assert {name: getattr(request, name) for name in expected} == expected


def test_a_stop_word_that_is_a_special_token_ends_the_answer_by_its_id() -> None:
    tokenizer = Tokenizer(SHIPPED_MODEL)
    start, end = "<|im_start|>", "<|im_end|>"
    asked = GenerationConfig(stop_words=[end, "stop"])
    request = request_of(asked, tokenizer, (start, "there"))
    assert request.stop == ["stop", "there"]
    assert request.stop_token_ids == [*tokenizer.encode(end, False), *tokenizer.encode(start, False)]
    # ignore_eos also ignores the template's end tokens
    assert request_of(dataclasses.replace(asked, ignore_eos=True), tokenizer, (start, "there")).stop == ["stop"]
    with pytest.warns(UserWarning, match="do_sample=True has no effect with top_k 1"):
        assert request_of(GenerationConfig(do_sample=True), tokenizer).temperature == 0.0


def test_a_wrong_value_is_refused_under_its_name_here(tokenizer: Tokenizer) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": math.nan, "top_k": 5}, "temperature"),
        ({"response_format": "json"}, "response_format"),
        ({"stop_words": [""]}, "stop_words"),
        ({"bad_token_ids": [-1]}, "bad_token_ids"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
    ]
    for given, param in wrong:
        with pytest.raises(RequestError, match=f"^{param}: ") as caught:
            request_of(GenerationConfig(**given), tokenizer)
        assert caught.value.param == param


# ---- chat templates

TALK = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
SYSTEM = {"role": "system", "content": "s"}


def rendered(config: ChatTemplateConfig, messages: list[dict[str, Any]]) -> str:
    template = way_of(config).template
    assert template is not None
    return template.render(messages)


def test_a_built_in_template() -> None:
    for name, system, plain in (
        ("llama2", "[INST] <<SYS>>\ns\n<</SYS>>\n\n", "[INST] a [/INST] b</s><s>[INST] c [/INST] "),
        ("internlm-chat-7b", "<|System|>:s\n", "<|User|>:a\n<|Bot|>:b<eoa>\n<|User|>:c\n<|Bot|>:"),
        ("vicuna", "s ", "USER: a ASSISTANT: b</s>USER: c ASSISTANT: "),
    ):
        assert rendered(ChatTemplateConfig(name), TALK) == plain
        first = plain.removeprefix("[INST] ") if name == "llama2" else plain
        assert rendered(ChatTemplateConfig(name), [SYSTEM, *TALK]) == system + first
    own = Tokenizer(SHIPPED_MODEL).template
    assert own is not None
    for name in ("chatml", "internlm2-chat-7b", "yi"):
        for talk in (TALK, [SYSTEM, *TALK]):
            assert rendered(ChatTemplateConfig(name), talk) == own.render(talk)
    for way in (way_of(ChatTemplateConfig(name)) for name in BUILT_IN):
        assert way.is_plain or isinstance(way.template, ChatTemplate)


def test_given_prompts_and_marks_take_the_place_of_the_built_in_ones() -> None:
    start = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\na"
    assert rendered(ChatTemplateConfig("qwen-7b"), TALK).startswith(start)
    assert rendered(ChatTemplateConfig("qwen-7b"), [SYSTEM, *TALK]).startswith("<|im_start|>system\ns<|im_end|>")
    config = ChatTemplateConfig("internlm-chat-7b", meta_instruction='Be {{ kind }} "now" \\ 书.', eoh="!\n")
    assert rendered(config, TALK[:1]) == '<|System|>:Be {{ kind }} "now" \\ 书.\n<|User|>:a!\n<|Bot|>:'
    assert way_of(ChatTemplateConfig("base")).is_plain
    assert way_of(ChatTemplateConfig("llama2", capability="completion")).is_plain
    assert way_of(ChatTemplateConfig("internlm-chat-7b")).stop_words == ("<eoa>",)
    assert way_of(ChatTemplateConfig("internlm-chat-7b", stop_words=["x"])).stop_words == ("x",)


def test_marks_by_themselves_make_a_template() -> None:
    for separator in ("separator", "stop_word_suffix"):
        config = ChatTemplateConfig(user="Q:", eoh=";", assistant="A:", eoa=".", **{separator: "\n"})  # type: ignore[arg-type]
        assert rendered(config, TALK) == "Q:a;A:b.\nQ:c;A:"
        with pytest.raises(RequestError, match="the role tool is not supported"):
            rendered(config, [{"role": "tool", "content": "x"}])


def test_a_wrong_template_is_refused_by_name() -> None:
    for fields, message in (
        ({"model_name": "lama2"}, "model_name 'lama2': no built-in chat template has that name"),
        ({"user": 5}, "ChatTemplateConfig.user 5: "),
        ({"model_name": "base", "stop_words": [5]}, r"stop_words \[5\]: "),
    ):
        with pytest.raises(ConfigError, match=message):
            way_of(ChatTemplateConfig(**fields))


def test_an_error_of_the_engine_s_has_the_fields_names() -> None:
    settings = ("max_num_seqs", "block_size", "attention_backend")
    early = [naming_of(turbomind.EngineConfig())(setting) for setting in settings]
    assert early == ["max_batch_size", "cache_block_seq_len", "--attention-backend"]
    assert naming_of(PytorchEngineConfig())("block_size") == "block_size"
