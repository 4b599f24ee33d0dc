"""Folders of adapters: what is read of them, what identifies them, and those that are refused by name."""

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
Tensors = dict[str, tuple[str, list[int]]]  # dtype and shape
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


def read(folder: Path, max_rank: int = 16) -> LoraFolder:
    return LoraFolder.read(folder, max_rank)


def test_what_is_read(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a"))
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
        ({"alpha_pattern": {"proj": 1}}, 4, 2.0),  # not the end of a name from a dot on
        ({"alpha_pattern": {r"layers.\d+.self_attn.q_proj": 1, "q_proj": 2}}, 4, 0.25),  # the first that matches
        ({"alpha_pattern": {r"^model.layers.0.self_attn.q_proj": 1}}, 4, 0.25),
        ({"alpha_pattern": {r"model\.layers\.\d+\.self_attn\.q_proj": 1}}, 4, 0.25),
        ({"alpha_pattern": {"self.attn.q_proj": 1}}, 4, 2.0),  # a dot is a dot
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
        ({"peft_type": None}, "peft_type None"),
        ({"use_dora": True}, "use_dora True: DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save 'lm_head': the file has no weight of it"),
        ({"modules_to_save": "lm_head"}, "modules_to_save 'lm_head': expected names of modules"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4': training began from a changed"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
        ({"init_lora_weights": 1}, "init_lora_weights 1"),
        ({"use_qalora": True}, "use_qalora True: this field is not known"),
        ({"something_new": 1}, "something_new 1: this field is not known"),
        ({"r": 0}, "r 0: expected a whole number"),
        ({"r": True}, "r True"),
        ({"r": "4"}, "r '4'"),
        ({"lora_alpha": "8"}, "lora_alpha '8'"),
        ({"lora_alpha": float("inf")}, "Infinity is not a number"),
        ({"lora_alpha": 1e300}, "lora_alpha 1e\\+300"),
        ({"use_rslora": 1}, "use_rslora 1: expected true or false"),
        ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern '\\(a\\+\\)\\+b'"),
        ({"rank_pattern": {r"\d+" * 40 + "x": 2}}, "rank_pattern .*with .* for a whole number"),
        ({"rank_pattern": {r"layers.\d+1": 2}}, "rank_pattern .*with .* for a whole number"),
        ({"rank_pattern": {"a" * 400: 2}}, "rank_pattern 'aaa"),
        ({"rank_pattern": {f"m{i}": 2 for i in range(2000)}}, "rank_pattern: expected an object with at most 1024"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern q_proj 0"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 4, but adapter_config.json has 2"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
        ({"layers_to_transform": [1]}, "layers_to_transform of adapter_config.json does not have its layer"),
        ({"layers_to_transform": "0"}, "layers_to_transform '0'"),
        ({"r": 32}, "rank 4, but"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read(write(tmp_path / "a", **config))


OTHER = PREFIX.replace("q_proj", "k_proj")


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, "0 tensors"),
        ({A: PLAIN[A]}, "lora_B.weight: missing"),
        ({**PLAIN, f"{PREFIX}.lora_magnitude_vector": ("F32", [6])}, "lora_magnitude_vector: DoRA"),
        ({**PLAIN, f"{PREFIX}.lora_B.bias": ("F32", [6])}, r"lora_B\.bias: biases"),
        ({**PLAIN, f"{PREFIX}.base_layer.bias": ("F32", [6])}, "base_layer"),
        ({**PLAIN, "base_model.model.model.embed_tokens.lora_embedding_A": ("F32", [4, 9])}, "embedding_B: missing"),
        ({**PLAIN, "base_model.model.lm_head.weight": ("F32", [4, 9])}, "lm_head.weight: not a matrix of a LoRA"),
        ({**PLAIN, "../../x.lora_A.weight": ("F32", [4, 8])}, "not a matrix of a LoRA"),
        ({**PLAIN, f"{PREFIX}.lora_A.other.weight": ("F32", [4, 8])}, "not a matrix of a LoRA"),
        ({**PLAIN, A.removeprefix("base_model.model."): ("F32", [4, 8])}, "twice"),
        ({A: ("F32", [4, 8]), B: ("F32", [6, 3])}, "do not have one rank"),
        ({A: ("I64", [4, 8]), B: ("F32", [6, 4])}, "dtype 'I64'"),
        ({A: ("F32", [4, 8, 1]), B: ("F32", [6, 4])}, "expected a matrix"),
        ({A: ("F32", [4, 0]), B: ("F32", [6, 4])}, "expected a matrix"),
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
        (b"[]", b"", None, "not a safetensors file"),
        (b'{"x": 1}', b"", None, "not a safetensors file"),
        (b"[" * 100_000, b"", None, "not a safetensors file"),
        (b"{" + b" " * (17 << 20) + b"}", b"", None, "a header of"),
        (b'{"x":0' + b',"x":0' * 300_000 + b"}", b"", None, "300001 times ':'; at most 65536 tensors"),
        (b'{"x":{"shape":[1' + b",1" * 400_000 + b"]}}", b"", None, "400000 times ','; at most 65536 tensors"),
        (
            json.dumps({A: {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}).encode(),
            b"1",
            None,
            "cut short",
        ),
        (json.dumps({A: {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 12]}}).encode(), b"1" * 12, None, "size"),
        (
            json.dumps({A: {"dtype": "F32", "shape": [4, 8], "data_offsets": [-128, 0]}}).encode(),
            b"",
            None,
            "not a safetensors file",
        ),
        (json.dumps({A: {"dtype": "F32", "shape": [1e3, 8], "data_offsets": [0, 1]}}).encode(), b"1", None, "matrix"),
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
    header = {
        A: {"dtype": "F32", "shape": [4, 8], "data_offsets": first},
        B: {"dtype": "F32", "shape": [6, 4], "data_offsets": second},
    }
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
    tensors = {A: [64, 1 << 23], B: [6, 64]}  # 2 GiB, in a hole
    header, at = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + math.prod(shape) * 4]}
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
    with found.file.open("rb") as stream:
        steps = Steps(stream.read())
    read_digested(steps, found.file_nbytes, digest := hashlib.sha256())
    assert digest.digest() == hashlib.sha256(data).digest()
    assert max(steps.asked) <= STEP_NBYTES


class Steps(io.BytesIO):
    """Counts how much is asked for at once."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.asked: list[int] = []

    def readinto(self, buffer: Any) -> int:
        self.asked.append(len(buffer))
        return super().readinto(buffer)


def _remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _pickle(folder: Path) -> None:
    _remove(folder, "adapter_model.safetensors")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")


def _link_out(folder: Path) -> None:
    (folder.parent / "secret").write_text("root:x:0")
    _remove(folder, "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").symlink_to("../secret")


def _loop(folder: Path) -> None:
    _remove(folder, "adapter_config.json")
    (folder / "adapter_config.json").symlink_to("adapter_config.json")


def _pipe(folder: Path) -> None:
    _remove(folder, "adapter_config.json")
    os.mkfifo(folder / "adapter_config.json")


def _long_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b" " * (2 << 20))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: _remove(folder, "adapter_config.json"), "adapter_config.json: missing"),
        (lambda folder: _remove(folder, "adapter_model.safetensors"), "adapter_model.safetensors: missing"),
        (_pickle, "adapter_model.bin: such files may run code"),
        (_link_out, "adapter_model.safetensors: leads out of its folder"),
        (_loop, "adapter_config.json: "),
        (_pipe, "adapter_config.json: not a file"),
        (_long_config, "adapter_config.json: 2097152 bytes"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "expected a JSON object"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    folder = write(tmp_path / "a")
    spoil(folder)
    with pytest.raises(ModelError, match=why) as refused:
        read(folder)
    assert "root:x" not in str(refused.value)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read(tmp_path / "a")


def test_links_of_a_hubs_cache(tmp_path: Path) -> None:
    """A snapshot's files are links to blobs; a link from there to anywhere else is refused."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    source = write(tmp_path / "a")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / name).rename(blobs / name[:9])
        (snapshot / name).symlink_to(f"../../blobs/{name[:9]}")
        if name == "adapter_config.json":
            (blobs / name[:9]).rename(blobs / "config")
            (snapshot / name).unlink()
            (snapshot / name).symlink_to("../../blobs/config")
    assert read(snapshot).tensors.modules
