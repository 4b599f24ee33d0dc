"""Every argument of `LLM` in both documents, and of `serve`, is honoured, reported as without effect, or refused."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

from pd_cluster import LLM
from pd_cluster.errors import ConfigError
from pd_cluster.offline.llm_arguments import HERE, OTHERS, config_of
from pd_cluster.offline.offline_service import launch_of
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.serve_options import ServeOptions, settings
from pd_cluster.settings.setting import Scope
from pd_cluster.settings.speculation import Speculation
from pd_cluster.settings.vllm_flags_without_setting import FOREIGN
from tests.support.offline import MakeLLM, fake_llms, same

make = pytest.fixture(fake_llms)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_signature_is_the_documents() -> None:
    """The signature has document 003's names, order and defaults; later arguments are keyword-only."""
    parameters = inspect.signature(LLM).parameters
    documented = (
        "model, tokenizer=None, tokenizer_mode='auto', skip_tokenizer_init=False, trust_remote_code=False, "
        "tensor_parallel_size=1, dtype='auto', quantization=None, revision=None, tokenizer_revision=None, seed=0, "
        "gpu_memory_utilization=0.9, swap_space=4, cpu_offload_gb=0, enforce_eager=None, "
        "max_context_len_to_capture=None, max_seq_len_to_capture=8192, disable_custom_all_reduce=False, "
        "disable_async_output_proc=False"
    )
    positional = [each for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    found = (f"{each.name}={each.default!r}" for each in positional)
    assert ", ".join(found).replace(f"={inspect.Parameter.empty!r}", "") == documented


def test_every_flag_of_serve_has_its_place() -> None:
    flags = [*ServeOptions()]
    honoured, workers, server = (
        [name for name, each in settings().items() if each.setting.scope in scopes]
        for scopes in (HERE, [Scope.WORKERS], [Scope.SERVER])
    )
    assert sorted([*honoured, *workers, *server]) == sorted(flags)


def test_the_defaults_are_those_of_serve_and_ask_for_nothing(make: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    _, offline = make()
    engine = offline.config.engine
    assert (engine.tensor_parallel_size, engine.dtype, engine.seed, engine.swap_space_gib) == (1, "auto", 0, 4.0)
    assert engine.gpu_memory_utilization is None, "a GPU's memory share must not apply to a CPU"
    assert (engine.block_size, engine.max_num_seqs, engine.enable_prefix_caching) == (None, 256, True)
    assert (offline.config.prefill, offline.config.decode, offline.config.max_logprobs) == (0, 0, 20)
    assert warnings_of(caplog) == []


def test_several_ranks_alone_are_worker_processes(make: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    _, offline = make(tensor_parallel_size=2)
    assert (offline.config.prefill, offline.config.decode) == (1, 1)
    assert offline.config.engine.tensor_parallel_size == 2
    (warning,) = warnings_of(caplog)
    assert warning.startswith("tensor_parallel_size=2: a prefill and a decode instance of 2 ranks each")


def test_instances_that_share_experts_are_worker_processes(make: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    _, offline = make(data_parallel_size=2, enable_expert_parallel=True)
    assert (offline.config.prefill, offline.config.decode) == (2, 2)
    (warning,) = warnings_of(caplog)
    assert warning.startswith("data_parallel_size=2: 2 prefill and 2 decode instances")
    launch = launch_of(offline.config)
    assert (launch.unit_sizes["prefill"], launch.unit_sizes["decode"]) == (2, 2)
    assert [each for each in launch.arguments if "parallel" in each] == ["--enable-expert-parallel"]
    _, offline = make(data_parallel_size=2, prefill=2, decode=3)
    with pytest.raises(ConfigError, match=r"decode.* 3: expected a multiple of 2"):
        launch_of(offline.config)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (
            {"swap_space": 1.5, "num_gpu_blocks_override": 640, "kv_offloading_size": 2, "block_size": 64},
            {"swap_space_gib": 1.5, "num_blocks": 640, "kv_host_cache_gib": 2, "block_size": 64},
        ),
        same(max_num_seqs=31, max_num_batched_tokens=512, enable_prefix_caching=False, dtype="float16", device="cpu"),
        same(preemption_mode="swap", growth_tokens=9, quantization="awq", gpu_memory_utilization=0.3, seed=5),
        same(kv_cache_dtype="int8", num_blocks=640, kv_cache_memory_gib=0.5, max_model_len=77),
        ({"device_memory_utilization": 0.25, "num_blocks": 9}, {"gpu_memory_utilization": 0.25, "num_blocks": 9}),
        ({"kv_cache_memory": 0.5}, {"kv_cache_memory_gib": 0.5}),
        ({"swap_space": 0}, {"swap_space_gib": 0}),
        # vLLM's values
        ({"kv_cache_memory_bytes": 3 << 29}, {"kv_cache_memory_gib": 1.5}),
        ({"kv_cache_memory_bytes": "512M"}, {"kv_cache_memory_gib": 0.5}),
        *(({"max_model_len": given}, {"max_model_len": n}) for given, n in (("1k", 1000), ("1K", 1024), (-1, None))),
        ({"max_model_len": "auto"}, {"max_model_len": None}),
        ({"max_num_batched_tokens": "2K"}, {"max_num_batched_tokens": 2048}),
        ({"max_cudagraph_capture_size": 64}, {"graph_sizes": (64,)}),
        *(
            (given, {"speculation": Speculation(methods=("ngram",), num_speculative_tokens=8)})
            for given in (
                {"speculative_config": {"method": "ngram", "num_speculative_tokens": 8}},
                {"spec_method": "ngram", "spec_tokens": 8},
                {"speculative_model": "[ngram]", "num_speculative_tokens": 8},
            )
        ),
        # values that request nothing
        ({"enforce_eager": True, "load_format": "safetensors", "quantization": None, "enable_lora": False}, {}),
        ({"speculative_config": None, "kv_transfer_config": {}, "logits_processors": [], "runner": "auto"}, {}),
    ],
)
def test_an_argument_of_the_engine_reaches_it(
    make: MakeLLM, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    _, offline = make(**arguments)
    assert {name: getattr(offline.config.engine, name) for name in fields} == fields
    assert warnings_of(caplog) == []


def test_a_token_of_the_hub_is_refused_unseen(make: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"^hf_token: .* HF_TOKEN") as caught:
        make(hf_token="hf_secret")
    assert "hf_secret" not in str(caught.value)


def test_no_argument_is_in_two_lists() -> None:
    assert not OTHERS.keys() & FOREIGN.keys()
    assert not OTHERS.keys() & {each.flag for each in settings().values()}


def test_arguments_of_chats_reach_the_text_service(make: MakeLLM) -> None:
    _, offline = make(
        chat_template="{{ messages[0].content }}", tool_call_parser="hermes", enable_auto_tool_choice=True
    )
    assert (offline.config.chat.template, offline.config.chat.tool_parser) == ("{{ messages[0].content }}", "hermes")
    assert offline.config.chat.trusts_request_templates, "a script's author may supply templates"
    for name in ("reasoning_parser", "resoning_parser"):
        assert make(**{name: "qwen3"})[1].config.chat.reasoning_parser == "qwen3"
    assert make(max_logprobs=7)[1].config.max_logprobs == 7


def test_what_cannot_matter_here_is_said_once(
    make: MakeLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    make(trust_remote_code=True, disable_custom_all_reduce=True, metrics_port=9001, enable_chunked_prefill=True)
    assert sorted(each.partition(" ")[0] for each in warnings_of(caplog)) == [
        *("VLLM_CPU_KVCACHE_SPACE", "disable_custom_all_reduce", "enable_chunked_prefill"),
        *("metrics_port", "trust_remote_code"),
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"tokenizer_mode": "fast"}, "tokenizer_mode 'fast': not supported"),
        ({"hf_overrides": {"a": len}}, "hf_overrides {'a': <built-in function len>}: "),
        ({"splitwise_role": "prefill"}, "splitwise_role 'prefill': not supported (give prefill= and decode=,"),
        ({"gpu_memory_utilization": -0.1}, "gpu_memory_utilization -0.1: "),
        ({"max_num_seqs": 0}, "max_num_seqs 0: "),
        ({"limit_mm_per_prompt": {"image": 100, "audio": 2}}, "limit_mm_per_prompt: audio 2: "),
        ({"reasoning_parser": "ernie-45"}, "reasoning_parser ernie-45: not known"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "lora_modules 'a': expected NAME=PATH"),
        ({"enable_lora": True, "max_lora_rank": 1024}, "max_lora_rank 1024: "),
        ({"max_model_length": 9}, "max_model_length: unknown argument; did you mean max_model_len?"),
        ({"spec_method": "eagle"}, "spec_method 'eagle': only EAGLE-3 heads are supported; give eagle3"),
        ({"speculative_config": {"method": "medusa"}}, "speculative_config: method 'medusa': not supported; "),
        (
            {"spec_method": "ngram", "speculative_config": {"method": "ngram"}},
            "speculative_config: spec_method also sets how",
        ),
        ({"zzz": 9}, "zzz: unknown argument; docs/flags.md has those of serve"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(make: MakeLLM, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**arguments)
    assert str(caught.value).startswith(error)


def test_what_names_the_files_of_the_model_reaches_the_engine() -> None:
    model = str(SHIPPED_MODEL)
    given = {"tokenizer": SHIPPED_MODEL, "tokenizer_revision": "t", "revision": "r", "download_dir": "/d"}
    others = {"hf_overrides": {"rope_theta": 5}, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    engine = config_of({"model": model, **given, **others, "max_context_len_to_capture": 99}).engine
    assert (engine.tokenizer, engine.tokenizer_revision, engine.revision) == (model, "t", "r")
    assert engine.download_dir == "/d"
    assert engine.hf_overrides == {"rope_theta": 5, "rope_scaling": others["rope_scaling"]}
    assert engine.max_seq_len_to_capture == 99
    both = {"max_seq_len_to_capture": 512, "swap_space": 4, "swap_space_gib": 8}
    engine = config_of({"model": model, **both, "max_context_len_to_capture": 4096}).engine
    assert (engine.max_seq_len_to_capture, engine.swap_space_gib) == (512, 8.0), "the signature's default is 4"
    assert config_of({"model": model, "rope_theta": 7.0}).engine.hf_overrides == {"rope_theta": 7.0}


def test_worker_processes_get_their_own_flags(make: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    _, offline = make(
        prefill=1, decode=2, tensor_parallel_size=2, kv_transport="dist", kv_checksum=False, dead_after=4.0
    )
    assert (offline.config.prefill, offline.config.decode) == (1, 2)
    assert offline.config.engine.tensor_parallel_size == 2
    assert offline.config.arguments == ("--kv-transport", "dist", "--no-kv-checksum", "--dead-after", "4.0")
    assert warnings_of(caplog) == []
