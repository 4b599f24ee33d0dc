"""LoRA folders: how they are read and identified, and which are refused by name."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.checkpoints.plain_files import STEP_NBYTES, read_digested
from pd_cluster.errors import ModelError
from tests.support.sparse_files import MANY_NBYTES, num_bytes_read, padded

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"
Tensors = dict[str, tuple[str, list[int]]]  # name -> (dtype, shape)
PLAIN: Tensors = {A: ("F32", [4, 8]), B: ("F32", [6, 4])}


def write(folder: Path, tensors: Tensors | None = None, fill: int = 1, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    header, at = {}, 0
    for name, (dtype, shape) in (PLAIN if tensors is None else tensors).items():
        nbytes = math.prod(shape) * {"F32": 4, "F16": 2, "BF16": 2}.get(dtype, 8)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    write_file(folder, json.dumps(header).encode(), bytes([fill]) * at)
    return folder


def write_file(folder: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    prefix = struct.pack("<Q", len(header) if length is None else length)
    (folder / "adapter_model.safetensors").write_bytes(prefix + header + data)


def entry(shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


def read(folder: Path, max_rank: int = 16) -> LoraFolder:
    return LoraFolder.read(folder, max_rank)


def test_what_is_read(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a"))
    with pytest.raises(ModelError, match="no such folder"):
        read(tmp_path / "none")
    assert list(found.tensors.modules) == ["model.layers.0.self_attn.q_proj"]
    pair = found.tensors.modules["model.layers.0.self_attn.q_proj"]
    assert (pair.a.shape, pair.b.shape, pair.rank) == ((4, 8), (6, 4), 4)
    assert pair.b.stop == os.path.getsize(found.file)


@pytest.mark.parametrize("form", ["{}.lora_{}.weight", "{}.lora_{}.default.weight"])
@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_forms_of_names(tmp_path: Path, form: str, prefix: str) -> None:
    names = [prefix + form.format("model.layers.0.mlp.up_proj", side) for side in "AB"]
    found = read(write(tmp_path / "a", {names[0]: ("BF16", [4, 8]), names[1]: ("F16", [6, 4])}))
    assert list(found.tensors.modules) == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({}, 4, 2.0),
        ({"use_rslora": True}, 4, 4.0),
        ({"lora_alpha": 3.5}, 4, 0.875),
        ({"alpha_pattern": {"q_proj": 1}}, 4, 0.25),
        ({"alpha_pattern": {"proj": 1}}, 4, 2.0),  # must match whole components of a name
        ({"alpha_pattern": {r"layers.\d+.self_attn.q_proj": 1, "q_proj": 2}}, 4, 0.25),  # the first match counts
        ({"alpha_pattern": {r"^model.layers.0.self_attn.q_proj": 1}}, 4, 0.25),
        ({"alpha_pattern": {r"model\.layers\.\d+\.self_attn\.q_proj": 1}}, 4, 0.25),
        ({"alpha_pattern": {"self.attn.q_proj": 1}}, 4, 2.0),  # a dot matches only a dot
        ({"alpha_pattern": {r"^layers.\d+.self_attn.q_proj": 1}}, 4, 2.0),
        ({"r": 2, "rank_pattern": {"self_attn.q_proj": 4}}, 4, 2.0),
    ],
)
def test_scales(tmp_path: Path, config: dict[str, Any], rank: int, scale: float) -> None:
    found = read(write(tmp_path / "a", **config))
    name = "model.layers.0.self_attn.q_proj"
    assert found.settings.rank_of(name) == rank
    assert found.settings.scale_of(name) == scale


def test_identity_is_settings_and_every_byte(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    first = read(folder).digest
    assert read(write(tmp_path / "b", base_model_name_or_path="/elsewhere", lora_dropout=0.1)).digest == first
    others = [read(write(tmp_path / "b", fill=2)).digest, read(write(tmp_path / "b", lora_alpha=9)).digest]
    others.append(read(write(tmp_path / "b", use_rslora=True)).digest)
    data = bytearray((folder / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(data)
    others.append(read(folder).digest)
    assert len({first, *others}) == 5


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a"))
    assert len(found.weights()) == os.path.getsize(found.file)
    write(tmp_path / "a", fill=3)
    with pytest.raises(ModelError, match="changed while it was loaded"):
        found.weights()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora True: DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": "lm_head"}, "modules_to_save 'lm_head': expected names of modules"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4': these tensors are right only"),
        ({"use_qalora": True}, "use_qalora True: this field is not known"),
        ({"something_new": 1}, "something_new 1: this field is not known"),
        ({"r": True}, "r True"),
        ({"lora_alpha": "8"}, "lora_alpha '8'"),
        ({"lora_alpha": float("inf")}, "Infinity is not a number"),
        ({"use_rslora": 1}, "use_rslora 1: expected true or false"),
        ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern '\\(a\\+\\)\\+b'"),
        ({"rank_pattern": {r"\d+" * 40 + "x": 2}}, "rank_pattern .*with .* for a whole number"),
        ({"rank_pattern": {"a" * 400: 2}}, "rank_pattern 'aaa"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern q_proj 0"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 4, but adapter_config.json has 2"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
        ({"layers_to_transform": "0"}, "layers_to_transform '0'"),
        ({"r": 32}, "rank 4, but"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read(write(tmp_path / "a", **config))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, "0 tensors"),
        ({A: PLAIN[A]}, "lora_B.weight: missing"),
        ({**PLAIN, f"{PREFIX}.lora_magnitude_vector": ("F32", [6])}, "lora_magnitude_vector: DoRA"),
        ({**PLAIN, f"{PREFIX}.lora_B.bias": ("F32", [6])}, r"lora_B\.bias: biases"),
        ({**PLAIN, f"{PREFIX}.base_layer.bias": ("F32", [6])}, "base_layer"),
        ({**PLAIN, "base_model.model.model.embed_tokens.lora_embedding_A": ("F32", [4, 9])}, "embedding_B: missing"),
        ({**PLAIN, "../../x.lora_A.weight": ("F32", [4, 8])}, "not a matrix of a LoRA"),
        ({**PLAIN, A.removeprefix("base_model.model."): ("F32", [4, 8])}, "twice"),
        ({A: ("F32", [4, 8]), B: ("F32", [6, 3])}, "have different ranks"),
        ({A: ("I64", [4, 8]), B: ("F32", [6, 4])}, "dtype 'I64'"),
        ({A: ("F32", [4, 8, 1]), B: ("F32", [6, 4])}, "expected a matrix"),
        ({A: ("F32", [64, 8]), B: ("F32", [6, 64])}, "rank 64 is above --max-lora-rank 16"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: Tensors, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read(write(tmp_path / "a", tensors))


@pytest.mark.parametrize(
    ("header", "data", "length", "why"),
    [
        (b"", b"", 1 << 60, "not a safetensors file .its header does not fit"),
        (b"{}", b"", 0, "not a safetensors file"),
        (b"[" * 100_000, b"", None, "not a safetensors file"),
        (b"{" + b" " * (17 << 20) + b"}", b"", None, "a header of"),
        (b'{"x":0' + b',"x":0' * 300_000 + b"}", b"", None, "300001 times ':'; at most 65536 tensors"),
        (b'{"x":{"shape":[1' + b",1" * 400_000 + b"]}}", b"", None, "400000 times ','; at most 65536 tensors"),
        (json.dumps({A: entry([4, 8], 0, 128)}).encode(), b"1", None, "cut short"),
        (json.dumps({A: entry([4, 8], 0, 12)}).encode(), b"1" * 12, None, "size"),
        (json.dumps({A: entry([4, 8], -128, 0)}).encode(), b"", None, "not a safetensors file"),
        (json.dumps({A: entry([1e3, 8], 0, 1)}).encode(), b"1", None, "matrix"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, header: bytes, data: bytes, length: int | None, why: str) -> None:
    folder = write(tmp_path / "a")
    write_file(folder, header, data, length)
    with pytest.raises(ModelError, match=why):
        read(folder)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ([0, 128], [96, 192], f"{B!r}: overlaps another tensor"),
        ([0, 128], [136, 232], f"{B!r}: follows 8 bytes that no tensor has"),
        ([8, 136], [136, 232], f"{A!r}: follows 8 bytes that no tensor has"),
    ],
)
def test_tensors_follow_one_another(tmp_path: Path, first: list[int], second: list[int], why: str) -> None:
    folder = write(tmp_path / "a")
    header = {A: entry([4, 8], *first), B: entry([6, 4], *second)}
    write_file(folder, json.dumps(header).encode(), bytes(second[1]))
    with pytest.raises(ModelError, match=why):
        read(folder)


def test_bytes_behind_the_tensors_are_refused_before_they_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    padded(folder / "adapter_model.safetensors", 2 << 30)
    before = num_bytes_read()
    with pytest.raises(ModelError, match="2147483648 bytes follow its last tensor"):
        read(folder)
    assert num_bytes_read() - before < MANY_NBYTES


def test_a_rank_above_the_limit_is_refused_before_its_numbers_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {})
    tensors = {A: [64, 1 << 23], B: [6, 64]}  # 2 GiB as a hole
    header, at = {}, 0
    for name, shape in tensors.items():
        header[name] = entry(shape, at, at := at + math.prod(shape) * 4)
    write_file(folder, json.dumps(header).encode())
    padded(folder / "adapter_model.safetensors", at)
    before = num_bytes_read()
    with pytest.raises(ModelError, match="rank 64 is above"):
        read(folder)
    assert num_bytes_read() - before < MANY_NBYTES


def test_a_large_file_is_read_in_steps_and_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {A: ("F32", [4, 1 << 20]), B: ("F32", [6, 4])})
    before = num_bytes_read()
    found = read(folder)
    data = found.weights()
    assert num_bytes_read() - before < 2 * found.file_nbytes + MANY_NBYTES
    assert bytes(data[:]) == found.file.read_bytes()
    asked: list[int] = []  # sizes that are allocated at once

    class Steps(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            asked.append(len(buffer))
            return super().readinto(buffer)

    read_digested(Steps(found.file.read_bytes()), found.file_nbytes, digest := hashlib.sha256())
    assert digest.digest() == hashlib.sha256(data).digest()
    assert max(asked) <= STEP_NBYTES


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def in_place_of(name: str, put: Callable[[Path], object] = lambda file: None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        put(folder / name)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (in_place_of(CONFIG), "adapter_config.json: missing"),
        (in_place_of(WEIGHTS), "adapter_model.safetensors: missing"),
        (in_place_of(WEIGHTS, lambda file: file.with_suffix(".bin").touch()), "adapter_model.bin: such files may run"),
        (
            in_place_of(WEIGHTS, lambda file: file.symlink_to("../secret")),
            "adapter_model.safetensors: leads out of its",
        ),
        (in_place_of(CONFIG, lambda file: file.symlink_to(CONFIG)), "adapter_config.json: "),
        (in_place_of(CONFIG, os.mkfifo), "adapter_config.json: not a file"),
        (in_place_of(CONFIG, lambda file: file.write_bytes(b" " * (2 << 20))), "adapter_config.json: 2097152 bytes"),
        (in_place_of(CONFIG, lambda file: file.write_text("{")), "not valid JSON"),
        (in_place_of(CONFIG, lambda file: file.write_text("[1]")), "expected a JSON object"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    (tmp_path / "secret").write_text("root:x:0")
    spoil(write(tmp_path / "a"))
    with pytest.raises(ModelError, match=why) as refused:
        read(tmp_path / "a")
    assert "root:x" not in str(refused.value)


def test_links_of_a_hubs_cache(tmp_path: Path) -> None:
    """A hub snapshot's files are links to blobs; links to other places are refused."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in [*write(tmp_path / "a").iterdir()]:
        file.rename(blobs / file.suffix[1:])
        (snapshot / file.name).symlink_to(f"../../blobs/{file.suffix[1:]}")
    assert read(snapshot).tensors.modules
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to((blobs / "safetensors").rename(tmp_path / "elsewhere"))
    with pytest.raises(ModelError, match="leads out of its folder"):
        read(snapshot)
