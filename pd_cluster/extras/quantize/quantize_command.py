"""`pd-cluster quantize`. Imports nothing heavy at the top."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pd_cluster.offline.quantization_quality import Samples

DEFAULT_METHODS = {"w4a16": "gptq", "w4a8": "gptq", "w8a8": "smoothquant"}
NUM_EVALUATED = 16  # samples for the evaluation, but at most an eighth of all; the methods do not use these


def quantize(
    model: Annotated[str, typer.Argument(help="Model folder with plain weights.")],
    out: Annotated[str, typer.Argument(help="New folder for the quantized model.")],
    scheme: Annotated[
        str, typer.Option(help="w8a8 (int8 weights and activations), w8a16, w4a16 and w4a8 (groups of 128) or fp8.")
    ] = "w4a16",
    method: Annotated[
        str,
        typer.Option(help="rtn (rounding, no data), gptq, smoothquant or awq; default: gptq, smoothquant for w8a8."),
    ] = "",
    calibration: Annotated[
        str, typer.Option(help="Text file, or .jsonl of texts or conversations; default: texts that the model writes.")
    ] = "",
    num_samples: Annotated[int, typer.Option(min=1, help="Samples to calibrate with.")] = 128,
    num_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of tokens of a sample.")] = 512,
    evaluate: Annotated[bool, typer.Option(help="Compare perplexity and next tokens with the original.")] = True,
) -> None:
    """Quantize a model folder. The new folder's format is compressed-tensors, which other engines also read.

    Works layer by layer, on the CPU. After a Ctrl-C or a kill, run it again: it continues with the next layer.
    """
    from pd_cluster.devices.openmp_spinning import PARKED

    for name, value in PARKED.items():  # before torch is loaded
        os.environ.setdefault(name, value)
    from pd_cluster.checkpoints.json_files import read_json
    from pd_cluster.extras.quantize.quantize_job import QuantizeJob
    from pd_cluster.extras.quantize.quantize_schemes import SCHEMES
    from pd_cluster.offline.offline_llm import LLM
    from pd_cluster.offline.quantization_quality import own_samples, quality_of, samples_of_file
    from pd_cluster.settings.engine_config import ONLY_ON_CPU
    from pd_cluster.text.tokenizer import Tokenizer

    method = _method_of(scheme, method)
    folder = Path(model).expanduser()
    needs_samples = method != "rtn" or evaluate
    if needs_samples:
        _check_length(model, num_tokens, samples_only=bool(calibration) and not evaluate)
    samples: Samples = []
    before = None
    device = "cpu" if scheme in ONLY_ON_CPU else "auto"  # the same device before and after quantizing
    wanted = num_samples + max(1, min(NUM_EVALUATED, num_samples // 8))
    if needs_samples and calibration:
        samples = samples_of_file(Path(calibration).expanduser(), Tokenizer(folder), folder, wanted, num_tokens)
    if needs_samples and (evaluate or not calibration):
        with LLM(model, dtype="float32", device=device, max_model_len=num_tokens + 1) as llm:
            if not samples:
                typer.echo("calibrating with texts that the model writes")
                samples = own_samples(llm, int(read_json(folder / "config.json")["vocab_size"]), wanted, num_tokens)
            held = _evaluation_samples(samples)
            before = quality_of(llm, held) if evaluate else None
    used = samples[: len(samples) - len(_evaluation_samples(samples))] or samples
    job = QuantizeJob(folder, Path(out).expanduser(), SCHEMES[scheme], method, used if method != "rtn" else [])
    num_layers = job.run(lambda done, total: typer.echo(f"layer {done} of {total}"))
    typer.echo(f"{num_layers} linear layers in {out}: {scheme} by {method}")
    if before is not None:
        with LLM(out, dtype="float32", device=device, max_model_len=num_tokens + 1) as llm:
            after = quality_of(llm, _evaluation_samples(samples))
        typer.echo(f"perplexity {before.perplexity:.3f} before, {after.perplexity:.3f} after")
        typer.echo(f"the same next token at {after.agreement(before):.1%} of {len(after.chosen)} positions")


def _method_of(scheme: str, method: str) -> str:
    """Returns the method, by default the scheme's. Raises ConfigError for an unknown scheme or method."""
    from pd_cluster.errors import ConfigError
    from pd_cluster.extras.quantize.quantize_layer import METHODS
    from pd_cluster.extras.quantize.quantize_schemes import SCHEMES

    if scheme not in SCHEMES:
        raise ConfigError(f"--scheme {scheme!r}: expected one of {', '.join(SCHEMES)}")
    method = method or DEFAULT_METHODS.get(scheme, "rtn")
    if method not in METHODS:
        raise ConfigError(f"--method {method!r}: expected one of {', '.join(METHODS)}")
    return method


def _check_length(model: str, num_tokens: int, samples_only: bool) -> None:
    """Raises ConfigError for samples that exceed the model's context; an engine needs one more token."""
    from pd_cluster.checkpoints.checkpoint import Checkpoint
    from pd_cluster.errors import ConfigError

    limit = Checkpoint.open(model).max_position_embeddings
    if num_tokens > (most := limit if samples_only else limit - 1):
        raise ConfigError(f"--num-tokens {num_tokens}: {model} takes {limit} tokens at most; use {most} or fewer")


def _evaluation_samples(samples: Samples) -> Samples:
    """Returns the samples that are reserved for the evaluation."""
    return samples[-max(1, min(NUM_EVALUATED, len(samples) // 8)) :]
