"""`pd-cluster bench quality`. Imports nothing heavy at the top."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_cluster.commands.settings_flags import given_model

if TYPE_CHECKING:
    from pd_cluster.offline.quantization_quality import Samples

NUM_SAMPLES, NUM_TOKENS = 16, 256


def quality(
    model: Annotated[str, typer.Option(callback=given_model, help="Model folder; default: the shipped model.")] = "",
    kv_cache_dtype: Annotated[str, typer.Option(help="KV cache dtypes to compare, separated by commas.")] = "",
    quantization: Annotated[str, typer.Option(help="Schemes of weight quantization, separated by commas.")] = "",
    quantize_head: Annotated[str, typer.Option(help="Schemes for the output layer, separated by commas.")] = "",
    calibration: Annotated[
        str, typer.Option(help="Text file, or .jsonl of texts or conversations; default: texts that the model writes.")
    ] = "",
    num_samples: Annotated[int, typer.Option(min=1, help="Samples to read.")] = NUM_SAMPLES,
    num_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of tokens of a sample.")] = NUM_TOKENS,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Compare perplexity and next tokens with a quantized KV cache or quantized weights to the plain model's."""
    from pd_cluster.offline.offline_llm import LLM
    from pd_cluster.offline.quantization_quality import Quality, quality_of
    from pd_cluster.result_tables import Report, Result, check_writable
    from pd_cluster.settings.engine_config import SHIPPED_MODEL

    check_writable(json)
    folder = model or str(SHIPPED_MODEL)
    compared = {"kv_cache_dtype": kv_cache_dtype, "quantization": quantization, "quantize_head": quantize_head}
    variants = [(setting, each) for setting, values in compared.items() for each in values.split(",") if each]
    with LLM(folder, max_model_len=num_tokens + 1) as llm:
        samples = samples_for(llm, Path(folder).expanduser(), calibration, num_samples, num_tokens)
        plain = quality_of(llm, samples)
    num_places = len(plain.chosen)

    def results(name: str, found: Quality) -> list[Result]:
        perplexity = Result(name=name, value=found.perplexity, unit="perplexity", better="lower", samples=num_places)
        if found is plain:
            return [perplexity]
        same = 100 * found.agreement(plain)
        return [perplexity, Result(name=name, value=same, unit="% same", better="higher", samples=num_places)]

    rows = results("as it is", plain)
    for setting, value in variants:
        changed: dict[str, Any] = {setting: value}
        with LLM(folder, max_model_len=num_tokens + 1, **changed) as llm:
            rows += results(f"--{_flag(setting)} {value}", quality_of(llm, samples))
    asked = "".join(
        f" --{name} {value}"
        for name, value in {"model": model, **{_flag(name): values for name, values in compared.items()}}.items()
        if value
    )
    report = Report(f"pd-cluster bench quality{asked} --num-samples {num_samples} --num-tokens {num_tokens}", rows)
    report.show(f"{num_places} positions; the same most probable next token")
    if json:
        report.write(json)


def _flag(setting: str) -> str:
    return setting.replace("_", "-")


def samples_for(llm: object, folder: Path, calibration: str, num_samples: int, num_tokens: int) -> Samples:
    """Returns samples from a file, or from texts that the model generates."""
    from pd_cluster.checkpoints.json_files import read_json
    from pd_cluster.offline.offline_llm import LLM
    from pd_cluster.offline.quantization_quality import own_samples, samples_of_file
    from pd_cluster.text.tokenizer import Tokenizer

    assert isinstance(llm, LLM)
    if calibration:
        return samples_of_file(Path(calibration).expanduser(), Tokenizer(folder), folder, num_samples, num_tokens)
    return own_samples(llm, int(read_json(folder / "config.json")["vocab_size"]), num_samples, num_tokens)
