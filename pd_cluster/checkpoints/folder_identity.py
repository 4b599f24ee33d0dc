"""A digest of a model folder's parts that affect results; processes with equal digests serve the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pd_cluster.checkpoints.plain_files import read_plain
from pd_cluster.checkpoints.sentencepiece import files_of
from pd_cluster.checkpoints.tensor_layouts import WeightFolder
from pd_cluster.checkpoints.weight_files import QUANTIZERS_FILES, weights_digest
from pd_cluster.errors import ModelError


def identity_of(
    folder: WeightFolder,
    tokenizer_path: Path | None,
    part_of: str,
    is_plain: Callable[[str], bool],
    of_images: Sequence[Path] = (),
) -> str:
    """Returns the digest. `of_images`: the files that determine how images are read, if the model reads images."""
    served = b"with images" if of_images else b"language model only" if part_of else b""
    digest = hashlib.sha256(served)
    path = folder.path
    files = [path / "config.json", *of_images]
    if tokenizer_path is not None:
        files += files_of(tokenizer_path)
    for file in files:
        if not file.exists():
            raise ModelError(
                f"{file}: missing; make it with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        digest.update(hashlib.sha256(read_plain(file)).digest())
    for file in sorted(each for pattern in QUANTIZERS_FILES for each in path.glob(pattern)):
        digest.update(file.name.encode() + hashlib.sha256(read_plain(file)).digest())
    weights = sorted({*path.glob("*.safetensors"), *folder.files()})
    if not weights:
        raise ModelError(f"{path}: no *.safetensors file; other weight formats are not loaded")
    for file in weights:
        digest.update(weights_digest(file, is_plain, folder.dtype))
    return digest.hexdigest()[:32]
