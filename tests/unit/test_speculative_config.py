"""All command-line forms of speculative decoding: vLLM's JSON and short forms, 0.6's flags, TACO-LLM's folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.offline.llm_arguments import config_of
from pd_cluster.offline.offline_service import launch_of
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.serve_options import ServeOptions, settings
from pd_cluster.settings.speculation import Speculation
from pd_cluster.settings.speculation_flags import FILE
from tests.unit.test_flags import parse

BOTH = ("ngram", "suffix")


def speculation(*argv: str) -> Speculation:
    given, warnings = parse("--model=m", *argv)
    assert warnings == []
    return ServeOptions(**given).engine().speculation


def config(**keys: Any) -> list[str]:
    return ["-sc", json.dumps(keys)]


def test_every_way_to_say_it() -> None:
    ngram = Speculation(methods=("ngram",))
    five = Speculation(methods=("ngram",), num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=4)
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    short = ["--ngram-prompt-lookup-max=4", "--ngram-prompt-lookup-min", "2"]
    draft = Speculation(methods=("draft_model",), model="a/b")
    model: dict[str, Any] = {
        "revision": "r",
        "quantization": "int8",
        "max_model_len": 9,
        "draft_sample_method": "greedy",
    }
    both = Speculation(methods=("ngram", "draft_model"), model="a/b", **model)
    suffix: dict[str, Any] = {
        "num_speculative_tokens": 64,
        "suffix_decoding_max_tree_depth": 8,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_min_token_prob": 0,
    }
    says: list[tuple[list[str], Speculation]] = [
        ([], Speculation()),
        (["--speculative-config="], Speculation()),
        (["--speculative-config", "null"], Speculation()),
        (config(method="ngram"), ngram),
        (config(model="[ngram]", rejection_sample_method="block", quantization=None, parallel_drafting=False), ngram),
        (["--spec-method=ngram"], ngram),
        (["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=16"], ngram),
        (config(method="ngram", num_speculative_tokens=5, **lookup), five),
        (["--spec-method", "ngram", "--spec-tokens=5", *short], five),
        (["--speculative-model", "[ngram]", "--num_speculative_tokens=5", *short], five),
        (
            config(method="ngram", prompt_lookup_max=3),
            Speculation(methods=("ngram",), prompt_lookup_min=3, prompt_lookup_max=3),
        ),
        (config(method="suffix", **suffix), Speculation(methods=("suffix",), **suffix)),
        (config(method=["suffix", "ngram"]), Speculation(methods=("suffix", "ngram"))),
        (config(method="draft_model", model="a/b", draft_tensor_parallel_size=1, quantization=""), draft),
        (config(model="a/b"), draft),
        (["--spec-model", "a/b"], draft),
        (["--speculative-model=a/b", "--spec-method=draft_model"], draft),
        (config(method=["ngram", "draft_model"], model="a/b", **model), both),
        (
            config(method="eagle3", model="a/b", revision="r", draft_tensor_parallel_size=1, quantization=""),
            Speculation(methods=("eagle3",), model="a/b", revision="r"),
        ),
        (["--spec-method=eagle3", "--spec-model=a/b"], Speculation(methods=("eagle3",), model="a/b")),
        (["--spec-method=mtp"], Speculation(methods=("mtp",))),
        (
            config(method=["suffix", "mtp"], draft_sample_method="greedy", draft_tensor_parallel_size=1),
            Speculation(methods=("suffix", "mtp"), draft_sample_method="greedy"),
        ),
        (config(method="mtp", model="m"), Speculation(methods=("mtp",), model="m")),
        (config(method="deepseek_mtp", model=""), Speculation(methods=("mtp",), mtp_type="deepseek_mtp")),
    ]
    for argv, wanted in says:
        assert speculation(*argv) == wanted, argv


REFUSED: list[tuple[list[str], str]] = [
    (config(method="draft_model"), "--speculative-config: model: missing; give a draft model: a folder"),
    (config(method="draft_model", model="[ngram]"), "model '[ngram]': not a draft model; give a draft model: a"),
    (config(model="m", draft_tensor_parallel_size=2), "draft_tensor_parallel_size 2: a draft model is not split"),
    (config(model="m", draft_sample_method="beam"), "'beam': expected probabilistic or greedy"),
    (config(model="m", quantization="int7"), "--speculative-config: quantization 'int7': expected one of awq"),
    (config(model="m", max_model_len=0), "max_model_len 0: must be in 1 to"),
    (config(model="m", revision=5), "revision 5: expected a text"),
    (config(model="m", parallel_drafting=True), "parallel_drafting: not supported; leave it out"),
    (
        [*config(model="m"), "--tensor-parallel-size=2"],
        "needs --tensor-parallel-size 1, but it is 2; give 1, or method ngram",
    ),
    (config(method="eagle", model="m"), "method 'eagle': only EAGLE-3 heads are supported; give eagle3"),
    (config(method="eagle3"), "model: missing; give an EAGLE-3 head: a folder, or a hub's model"),
    (config(method="mimo_mtp"), "no model of that type is served with MTP layers; give mtp with one of deepseek_v3,"),
    (config(method="mtp", model="n"), "model n: mtp drafts with layers of --model m itself; leave it out"),
    (config(method=["mtp", "deepseek_mtp"]), "method ['mtp', 'deepseek_mtp']: give each method once"),
    (config(method=["eagle3", "ngram", "mtp"], model="m"), "weights; give one of eagle3 and mtp"),
    (config(method="mtp", draft_tensor_parallel_size=2), "draft_tensor_parallel_size 2: mtp is not split"),
    (["--spec-method=mtp", "--tensor-parallel-size=2"], "method mtp needs --tensor-parallel-size 1, but it is 2"),
    *(
        (config(method=method, model="m", **{key: value}), f"{key}: applies to a draft model, and {method} has none")
        for method, key, value in (
            *(("eagle3", *each) for each in (("quantization", "int8"), ("max_model_len", 9))),
            *(("mtp", *each) for each in (("quantization", "int8"), ("max_model_len", 9), ("revision", "r"))),
        )
    ),
    (config(method="suffix", model="ngram"), "model 'ngram': suffix needs no model; leave it out"),
    *((config(method=each), "not supported; give ngram") for each in ("medusa", "mlp_speculator", "dflash", "dspark")),
    (config(method="ngram_gpu"), "give ngram"),
    (config(method="custom_class"), "foreign code is not loaded"),
    (config(method="extract_hidden_states"), "/v1/embeddings"),
    (config(method="ngrams"), "no such method; did you mean ngram?"),
    (config(method=5), "method 5: expected ngram or suffix"),
    (config(method=[]), "method: missing; give ngram or suffix"),
    (config(method=["ngram", "ngram"]), "give each method once"),
    (config(num_speculative_tokens=5), "method: missing; give ngram or suffix"),
    *(
        (config(method="ngram", **{key: value}), f"{key}: applies to a draft model")
        for key, value in {"draft_tensor_parallel_size": 1, "max_model_len": 9, "revision": "r"}.items()
    ),
    *(
        (config(method="ngram", draft_sample_method=each), "applies to a draft model")
        for each in ("greedy", "probabilistic")
    ),
    (config(method="ngram", rejection_sample_method="synthetic"), "would change answers; give standard or block"),
    (config(method="ngram", synthetic_acceptance_rates=[1]), "would change answers"),
    (config(method="ngram", rejection_sample_method=5), "rejection_sample_method 5: expected standard or block"),
    (config(method="ngram", prompt_lookup_mix=2), "prompt_lookup_mix: no such key; did you mean prompt_lookup_min?"),
    (config(method="ngram", disable_by_batch_size=4), "give num_speculative_tokens_per_batch_size"),
    *(
        (config(method="ngram", num_speculative_tokens=each), f"num_speculative_tokens {each}: must be in 1 to 64")
        for each in (0, 65)
    ),
    (config(method="ngram", num_speculative_tokens=True), "num_speculative_tokens True: expected a whole number"),
    (config(method="ngram", prompt_lookup_min=0), "prompt_lookup_min 0: must be in 1 to 1024"),
    (
        config(method="suffix", suffix_decoding_min_token_prob=1.5),
        "suffix_decoding_min_token_prob 1.5: must be in 0 to 1",
    ),
    (config(method="suffix", suffix_decoding_max_spec_factor=float("nan")), "suffix_decoding_max_spec_factor nan: "),
    (config(method="ngram", prompt_lookup_min=4, prompt_lookup_max=3), "prompt_lookup_min 4: is above "),
    *(
        (config(method="ngram", num_speculative_tokens_per_batch_size=ranges), error)
        for ranges, error in (
            ([[1, 4, 3], [4, 8, 2]], "ranges overlap at 4"),
            ([[2, 4, 3]], "the first range must begin at 1"),
            ([[1, 4, 65]], "[1, 4, 65]: expected numbers of sequences from 1 on, and 0 to 64 drafts"),
            ([[4, 1, 3]], "[4, 1, 3]: expected numbers"),
            ([[1, 4]], "expected ranges [first, last, drafts]"),
            (5, "expected ranges [first, last, drafts]"),
        )
    ),
    (["-sc", "[1]"], "--speculative-config '[1]': expected an object with method"),
    (["-sc", "{"], "--speculative-config '{': is not JSON"),
    (["--spec-tokens=5"], "--spec-method: missing; give ngram or suffix"),
    (["--spec-method=ngram", "--spec-tokens=65"], "--spec-tokens 65: must be in 1 to 64"),
    (
        ["--spec-method=ngram", "--ngram-prompt-lookup-min=3", "--ngram-prompt-lookup-max=2"],
        "--ngram-prompt-lookup-min 3: is above --ngram-prompt-lookup-max 2",
    ),
    (["--spec-model=m", "--spec-method=suffix"], "--spec-model 'm': suffix needs no model"),
    (["--speculative-disable-by-batch-size=0"], "--speculative-disable-by-batch-size 0: must be in 1 to 2147483646"),
    ([*config(method="ngram"), "--spec-tokens=5"], "--speculative-config: --spec-tokens also sets how to draft"),
    (
        ["--lookahead-cache-config-dir=.", "--spec-method=ngram"],
        "--lookahead-cache-config-dir: --spec-method also sets how",
    ),
    (
        ["--lookahead-cache-config-dir=/no", *config(method="ngram")],
        "--speculative-config: --lookahead-cache-config-dir",
    ),
    (["--lookahead-cache-config-dir=/no/such"], "--lookahead-cache-config-dir /no/such: no such folder"),
    (["--speculative-draft-model-path=m"], "give --speculative-config, whose keys for a draft model"),
    (["--speculative-algorithm", "NGRAM"], "give --speculative-config"),
    (["--speculative-num-draft-tokens=4"], "give --speculative-config"),
    (
        ["--spec-decoding-acceptance-method=typical_acceptance_sampler"],
        "only the token that would have been sampled is accepted",
    ),
]


@pytest.mark.parametrize(("argv", "error"), REFUSED)
def test_what_is_not_served_is_refused_by_name(argv: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        speculation(*argv)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_drafts_by_batch_size_are_those_of_vllm() -> None:
    """As in vLLM's lookup table, gaps and sizes after the last range use the previous range."""
    rng = random.Random(52)
    for _ in range(50):
        ends = sorted(rng.sample(range(2, 40), 6))
        ranges = [[1, ends[0], rng.randrange(9)]]
        ranges += [[first, last, rng.randrange(9)] for first, last in zip(ends[1::2], ends[2::2], strict=False)]
        given = rng.sample(ranges, len(ranges))
        found = speculation(
            *config(method="ngram", num_speculative_tokens=6, num_speculative_tokens_per_batch_size=given)
        )
        table = {number: most for first, last, most in ranges for number in range(first, last + 1)}
        for number in range(1, 45):
            table.setdefault(number, table.get(number - 1, 0))
            assert found.most_drafts(number) == min(table[number], 6)
    off = speculation("--spec-method=ngram", "--speculative-disable-by-batch-size=4")
    assert [off.most_drafts(number) for number in (1, 4, 5, 999)] == [16, 16, 0, 0]
    assert Speculation().most_drafts(7) == 16


def test_the_lookahead_cache_of_taco_llm(tmp_path: Path) -> None:
    folder = f"--lookahead-cache-config-dir={tmp_path}"
    theirs: dict[str, Any] = {"num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    theirs["suffix_decoding_max_cached_tokens"] = 5_000_000
    assert speculation(folder) == Speculation(methods=BOTH, **theirs), "expected its documented defaults"
    for written, changed in (
        ({"cache_mode": 0}, {"methods": ("ngram",)}),
        ({"cache_mode": 1, "cache_size": 99}, {"methods": ("suffix",), "suffix_decoding_max_cached_tokens": 99}),
        ({"cache_mode": 2, "copy_length": 9, "match_length": 4}, {"num_speculative_tokens": 9, "prompt_lookup_max": 4}),
        ({"match_length": 1}, {"prompt_lookup_min": 1, "prompt_lookup_max": 1}),
        ({"match_length": 4, "min_match_length": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 4}),
    ):
        (tmp_path / FILE).write_text(json.dumps(written))
        assert speculation(folder) == Speculation(**{"methods": BOTH, **theirs, **changed})
    (tmp_path / FILE).write_text('{"cache_mode": 2, "top_k": 3, "decay": 0.5}')
    (remark,) = ServeOptions(lookahead_cache_config_dir=str(tmp_path)).remarks()
    assert remark == f"{tmp_path / FILE}: no effect here: top_k, decay"
    for text, error in (
        ('{"cache_mode": 3}', "cache_mode 3: expected 0 (ngram), 1 (suffix) or 2 (both)"),
        ('{"copy_length": 65}', "copy_length 65: must be in 1 to 64"),
        ('{"match_length": 2, "min_match_length": 3}', "min_match_length 3: is above"),
        ("[", "is not JSON"),
        ("[]", "expected an object"),
    ):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ConfigError) as caught:
            speculation(folder)
        assert error in str(caught.value)


def test_worker_processes_of_llm_draft_as_it_was_told(tmp_path: Path) -> None:
    """Whatever was given is passed on in one form, which all processes read alike."""
    for given in (
        {"speculative_config": {"method": ["suffix", "ngram"], "suffix_decoding_max_spec_factor": 0.5}},
        {"spec_method": "ngram", "speculative_disable_by_batch_size": 4},
        {"speculative_config": {"method": ["ngram", "glm4_moe_mtp"], "draft_sample_method": "greedy"}},
        {"speculative_config": {"method": "eagle3", "model": "a/b", "revision": "r"}},
        {"speculative_config": {"model": "a/b", "draft_sample_method": "greedy", "quantization": "int8"}},
        {"spec_method": "ngram", "ngram_prompt_lookup_min": 2, "ngram_prompt_lookup_max": 5},
        {"lookahead_cache_config_dir": str(tmp_path)},
        {},
    ):
        made = config_of({"model": str(SHIPPED_MODEL), **given}, prefill=1, decode=1)
        flags = [each for each in launch_of(made).arguments if each.startswith("--speculative-config")]
        assert len(flags) == len(given and [1])
        assert speculation(*flags) == made.engine.speculation
    form = settings()["speculative_config"]
    assert form.read(form.write(Speculation())) == Speculation()
