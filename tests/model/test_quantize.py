"""`pd-cluster quantize`: methods, folders that the engine reads back to the bit, interruption, refusals."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.commands import bench_command as commands
from pd_cluster.commands.cli import main
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.extras.quantize.quantize_command import quantize
from pd_cluster.extras.quantize.quantize_job import PARTIAL, QuantizeJob
from pd_cluster.extras.quantize.quantize_methods import awq_scales, gptq, numbers, round_to_nearest, smooth_scales
from pd_cluster.extras.quantize.quantize_schemes import SCHEMES, packed
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.loading.model_loader import load_model, probe_logits
from pd_cluster.offline.quantization_quality import Quality, samples_of, texts_of
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.support import full_disks
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import random_prompt
from tests.support.quantized import FORMATS, rewritten, words_of

SAMPLES = [random_prompt(random.Random(seed), 40) for seed in range(8)]
W4 = SCHEMES["w4a16"]


def logits_of(folder: Path) -> torch.Tensor:
    model = load_model(Checkpoint.open(str(folder)), "float32", CPU)
    return probe_logits(model, layout_of(model.caches, 16, "float32"), CPU)


def error_of(folder: Path, original: Path) -> float:
    expected = logits_of(original)
    return float((logits_of(folder) - expected).abs().max() / expected.abs().max())


def correlated(num_rows: int, num_inputs: int) -> torch.Tensor:
    """Returns inputs that vary in few directions, with some features much larger than the others."""
    torch.manual_seed(0)
    x = torch.randn(num_rows, 8) @ torch.randn(8, num_inputs) + 0.1 * torch.randn(num_rows, num_inputs)
    x[:, ::32] *= 20
    return x


def error_in(x: torch.Tensor, weight: torch.Tensor, found: torch.Tensor) -> float:
    return float((x @ (found - weight).T).square().mean())


def test_gptq_and_awq_lose_less_than_rounding() -> None:
    x, weight = correlated(256, 256), torch.randn(64, 256)
    nearest = error_in(x, weight, numbers(*round_to_nearest(weight, W4)))
    corrected = error_in(x, weight, numbers(*gptq(weight, x.T @ x, W4)))
    assert corrected < 0.5 * nearest
    scales = awq_scales(x, [weight], W4)
    assert error_in(x, weight, numbers(*round_to_nearest(weight * scales, W4)) / scales) < nearest


def test_inputs_of_gptq_and_smoothing() -> None:
    """Without inputs GPTQ rounds to nearest; weights of unused inputs become 0; smoothing moves outliers to weights."""
    weight, nothing = torch.randn(8, 128), torch.full((128, 128), float("nan"))
    found, nearest = gptq(weight, nothing, W4), round_to_nearest(weight, W4)
    assert all(torch.equal(one, other) for one, other in zip(found, nearest, strict=True))
    x = correlated(256, 128)
    x[:, 5] = 0
    assert not gptq(weight, x.T @ x, W4)[0][:, 5].any()
    assert smooth_scales(torch.tensor([1.0, 100.0]), [torch.ones(4, 2)], 0.5).tolist() == [1.0, 10.0]


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_format(bits: int) -> None:
    torch.manual_seed(0)
    fields = torch.randint(0, 1 << bits, (3, 21))
    assert torch.equal(packed(fields, bits), words_of(fields, bits))


@pytest.mark.parametrize(
    ("scheme", "method", "most", "architecture"),
    [
        ("w4a16", "awq", 0.9, "qwen2"),
        ("w8a8", "smoothquant", 0.1, "gemma2"),
        ("w4a16", "gptq", 0.9, "llama"),
        ("w4a8", "gptq", 0.9, "gemma2"),
        ("w8a16", "rtn", 0.15, "mixtral"),
        ("fp8", "rtn", 0.3, "llama"),
    ],
)
def test_the_folder_is_near_its_original(
    tmp_path: Path, architecture: str, scheme: str, method: str, most: float
) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    out = tmp_path / "out"
    job = QuantizeJob(folder, out, SCHEMES[scheme], method, SAMPLES)
    seen: list[int] = []
    num_layers = job.run(lambda done, total: seen.append(done))
    assert num_layers == (16 if architecture == "mixtral" else 7) * len(seen)
    assert not (out / PARTIAL).exists()
    assert (out / "tokenizer.json").exists()
    assert 0 < error_of(out, folder) < most


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])  # gpt_oss's parameters are not all called "weight"
def test_an_interrupted_job_continues_with_the_same_numbers(tmp_path: Path, architecture: str) -> None:
    """Interrupts after the first layer; with GPTQ, later layers depend on it."""
    folder = make_checkpoint(tmp_path / "model", architecture)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    def job(out: str) -> QuantizeJob:
        return QuantizeJob(folder, tmp_path / out, W4, "gptq", SAMPLES)

    with pytest.raises(KeyboardInterrupt):
        job("resumed").run(stop)
    (first,) = (tmp_path / "resumed" / PARTIAL).glob("layer-*.safetensors")
    kept = first.read_bytes()
    with pytest.raises(ConfigError, match="not empty, and not an unfinished job with the same settings"):
        QuantizeJob(folder, tmp_path / "resumed", W4, "rtn", []).run()
    job("resumed").run()
    job("whole").run()
    files = {out: sorted((tmp_path / out).glob("*.safetensors")) for out in ("resumed", "whole")}
    assert files["resumed"][0].read_bytes() == kept
    for one, other in zip(files["resumed"], files["whole"], strict=True):
        for name, tensor in load_file(one).items():
            assert torch.equal(tensor, load_file(other)[name]), name


@contextlib.contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Limits file sizes, and expects the job's error."""
    with (
        full_disks.full_disk(nbytes),
        pytest.raises(ConfigError, match=r"out: cannot be written: .*command continues$"),
    ):
        yield


@pytest.mark.parametrize("nbytes", [4096, 0])
def test_a_disk_that_is_full_ends_a_job_that_can_go_on(tmp_path: Path, nbytes: int) -> None:
    """The job can continue later, or restart, after a full disk."""
    job = QuantizeJob(make_checkpoint(tmp_path / "model", "llama"), tmp_path / "out", W4, "rtn", [])
    with full_disk(nbytes):
        job.run()
    assert job.run() == 21
    assert (tmp_path / "out" / "config.json").exists()


def test_a_layer_s_file_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    job = QuantizeJob(folder, tmp_path / "out", W4, "gptq", SAMPLES)

    def cut(done: int, total: int) -> None:
        (file,) = (tmp_path / "out" / PARTIAL).glob("layer-*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(cut)
    assert job.run() == 21
    QuantizeJob(folder, tmp_path / "whole", W4, "gptq", SAMPLES).run()
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(tmp_path / "whole"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The error names the unreadable file, not the output folder."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    job = QuantizeJob(folder, tmp_path / "out", W4, "rtn", [])
    (folder / "vocab").symlink_to("/proc/self/mem")  # opens, but reading fails
    with pytest.raises(
        ModelError, match=r"model/vocab: cannot be read: .*; the same command continues once it can be read$"
    ):
        job.run()
    (folder / "vocab").unlink()
    assert job.run() == 21


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight contains NaN or infinity; copy"):
        QuantizeJob(folder, tmp_path / "out", W4, "gptq", SAMPLES).run()


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match=r"config\.json: is a file; give another folder"):
        QuantizeJob(folder, folder / "config.json", W4, "rtn", []).run()
    quantized, _ = rewritten(folder, tmp_path, FORMATS["awq"])
    with pytest.raises(ModelError, match="the model is already quantized"):
        QuantizeJob(quantized, tmp_path / "a", W4, "rtn", []).run()
    with pytest.raises(ModelError, match="no linear layer has a known name"):
        QuantizeJob(make_checkpoint(tmp_path / "neox", "gpt_neox"), tmp_path / "b", W4, "rtn", []).run()
    with pytest.raises(ConfigError, match="no text to calibrate with"):
        QuantizeJob(folder, tmp_path / "c", W4, "gptq", []).run()
    with pytest.raises(ModelError, match="--method rtn"):
        QuantizeJob(make_checkpoint(tmp_path / "moe", "mixtral"), tmp_path / "d", W4, "gptq", SAMPLES).run()


def test_samples_longer_than_the_model_takes(tmp_path: Path) -> None:
    said = r"^--num-tokens {}: .* takes 2048 tokens at most; use {} or fewer$"
    with pytest.raises(ConfigError, match=said.format(2048, 2047)):
        quantize(str(SHIPPED_MODEL), str(tmp_path / "out"), num_tokens=2048)
    missing = str(tmp_path / "texts")  # would be opened after the check
    with pytest.raises(ConfigError, match=said.format(2049, 2048)):
        quantize(str(SHIPPED_MODEL), str(tmp_path / "out"), calibration=missing, num_tokens=2049, evaluate=False)
    with pytest.raises(ConfigError, match=r"texts: cannot be read"):
        quantize(str(SHIPPED_MODEL), str(tmp_path / "out"), calibration=missing, num_tokens=2048, evaluate=False)


def test_calibration_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one two three", "utf-8")
    conversation = {"messages": [{"role": "user", "content": "hi"}]}
    lines.write_text("\n".join(json.dumps(each) for each in ("a text", {"text": "b"}, conversation)) + "\n\n", "utf-8")
    assert texts_of(plain, None) == ["one two three"]
    assert texts_of(lines, lambda messages: messages[0]["content"]) == ["a text", "b", "hi"]
    lines.write_text('{"neither": 1}', "utf-8")
    with pytest.raises(ConfigError, match="line 1: expected a text"):
        texts_of(lines, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        texts_of(tmp_path / "missing", None)
    assert samples_of(["abcdefg", "h"], list, 9, 3) == [["a", "b", "c"], ["d", "e", "f"]]
    with pytest.raises(ConfigError, match="no text of two tokens"):
        samples_of(["a"], list, 9, 3)


def test_quality_is_perplexity_and_the_share_of_equal_tokens() -> None:
    one, other = Quality([-1.0, -3.0], [5, 6]), Quality([-1.0, -1.0], [5, 7])
    assert one.perplexity == pytest.approx(7.389, abs=1e-3)
    assert one.agreement(other) == 0.5


def test_the_command_on_the_shipped_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    """The command calibrates with the model's own texts, and compares."""
    flags = ["--scheme", "w8a8", "--num-samples", "16", "--num-tokens", "32"]
    monkeypatch.setattr(sys, "argv", ["pd-cluster", "quantize", str(SHIPPED_MODEL), str(tmp_path / "out"), *flags])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        logging.captureWarnings(False)
    written = capsys.readouterr()
    assert not ended.value.code, written.err
    assert "28 linear layers" in written.out
    share = float(written.out.partition("the same next token at ")[2].partition("%")[0])
    assert share > 95


def test_links_and_pipes_in_the_place_of_its_files_are_replaced(tmp_path: Path) -> None:
    job = QuantizeJob(make_checkpoint(tmp_path / "model", "llama"), tmp_path / "out", W4, "rtn", [])
    with full_disk(4096):
        job.run()
    (tmp_path / "outside").write_text("theirs")
    partial = next(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "outside")
    for name in ("rest.safetensors", "layer-00000.new"):
        (partial / name).unlink(missing_ok=True)
        (partial / name).symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "out" / "model.safetensors.index.json")
    assert job.run() == 21
    assert (tmp_path / "outside").read_text() == "theirs"
    assert not any(path.is_symlink() or path.is_fifo() for path in (tmp_path / "out").iterdir())


def test_quality_is_measured_against_the_model_as_it_is(tmp_path: Path, one_thread: None) -> None:
    """On the shipped model `bench quality` reports hardly any change by 8 bits, and some by 4."""
    file, texts = tmp_path / "out.json", tmp_path / "texts.txt"
    texts.write_text("The sea is wide, and the moon pulls the water twice a day. " * 12)
    arguments = ["quality", "--kv-cache-dtype", "int8,int4", "--quantization", "int8", "--calibration", str(texts)]
    result = CliRunner().invoke(commands.app, [*arguments, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    found = {(each["name"], each["unit"]): each["value"] for each in json.loads(file.read_text())["results"]}
    plain = found["as it is", "perplexity"]
    assert found["--kv-cache-dtype int8", "perplexity"] == pytest.approx(plain, rel=0.02)
    assert found["--kv-cache-dtype int4", "perplexity"] != plain
    assert 90 < found["--kv-cache-dtype int8", "% same"] <= 100
    assert ("--quantization int8", "perplexity") in found
