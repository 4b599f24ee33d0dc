"""`bench engine --dtype … --quantization …`: the forms that flags ask for, and what is refused."""

from __future__ import annotations

import pytest

from benchmarks.engine.bits import Form, make_bench, setup_of
from benchmarks.tiny_model import ModelShape
from pd_cluster.errors import ConfigError

SETUP = ("", "", 1, 2, "")


def test_each_combination_of_flags_is_a_form() -> None:
    bench = make_bench("float32,bfloat16", "none,int4_wo", "none,int8", "", setup_of(*SETUP, quick=False))
    assert len(bench.forms) == 8
    assert list(bench.shapes) == ["125M"]
    assert bench.command.startswith("pd-cluster bench engine --dtype float32,bfloat16 --quantization none,int4_wo ")


@pytest.mark.parametrize(
    ("form", "types"),
    [
        (Form("float32", "none", "none"), ("", "")),  # the file as it is
        (Form("bfloat16", "none", "none"), ("BF16", "BF16")),
        (Form("float32", "int8", "none"), ("Q8_0", "F32")),
        (Form("bfloat16", "int4_wo", "int8"), ("Q4_0", "Q8_0")),
        (Form("bfloat16", "w4a8", "none"), ("Q4_0", "BF16")),
    ],
    ids=str,
)
def test_other_engines_have_the_same_precision(form: Form, types: tuple[str, str]) -> None:
    assert form.gguf_types == types


def test_bytes_of_a_token() -> None:
    shape = ModelShape()
    layers, head = 12 * sum(a * b for a, b in shape.layer_linears()), 32000 * 768
    assert Form("float32", "none", "none").read_nbytes(shape) == 4 * (layers + head)
    assert Form("bfloat16", "int8", "none").read_nbytes(shape) == layers + 2 * head


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("float16", "", "", ""), "--dtype float16: expected some of float32,bfloat16"),
        (("", "int3", "", ""), "--quantization int3: expected some of none,int8,int8_wo,int4_wo,w4a8"),
        (("", "", "", "8B"), "--shape 8B: expected some of 125M,1B"),
    ],
)
def test_unknown_names_are_refused(given: tuple[str, str, str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_bench(*given, setup_of(*SETUP, quick=False))


@pytest.mark.parametrize(
    ("peers", "workload", "said"),
    [("generate", "", "--peers generate: .*vllm,llama.cpp with"), ("", "mixed", "--workload mixed: not together")],
)
def test_flags_of_the_other_form_of_the_command_are_refused(peers: str, workload: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        setup_of(peers, workload, 1, 2, "", quick=False)
