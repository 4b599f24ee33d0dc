"""`pd-cluster bench quality`, from the command line on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_cluster.commands import bench as commands


def test_quality_is_measured_against_the_model_as_it_is(tmp_path: Path, one_thread: None) -> None:
    """`bench quality` on the shipped model: 8 bits change next to nothing, 4 bits something."""
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
