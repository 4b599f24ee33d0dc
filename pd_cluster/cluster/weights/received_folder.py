"""Makes the server's own folders of versions, from tensors that a trainer sends or links to files of its folders."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pd_cluster.checkpoints.replaced_weights import stamp_of, tensors_of
from pd_cluster.checkpoints.weight_files import INDEX, QUANTIZERS_FILES
from pd_cluster.errors import ModelError, RequestError
from pd_cluster.process_messages import SentTensor

log = logging.getLogger(__name__)

RECEIVED = "received-"  # the prefix of these folders' names; the server removes such folders
# torch's names of dtypes, as trainers send them, and safetensors' names
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class ReceivedFolder:
    """`base`: the model's folder. Its methods block, so call them on a separate thread."""

    def __init__(self, root: Path, base: Path, number: int) -> None:
        self.path, self._base = root / f"{RECEIVED}{number}", base
        self._tensors = tensors_of(base)
        self._files: dict[str, str] = {}  # tensor -> file
        shutil.rmtree(self.path, ignore_errors=True)  # of an earlier life of this process
        self.path.mkdir(mode=0o700)

    def next_file(self, tensors: Sequence[SentTensor]) -> Path:
        """Returns the file for these tensors. Raises RequestError for a wrong or repeated tensor."""
        name = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        for each in tensors:
            if each.name in self._files:
                raise RequestError(f"names: {each.name[:256]!r} has already been sent in this update", "update_info")
            sent, wanted = (DTYPES.get(each.dtype, each.dtype), tuple(each.shape)), self._tensors.get(each.name)
            if sent != wanted:
                own = "does not have it" if wanted is None else f"has {wanted[0]} {list(wanted[1])}"
                shown = f"{each.name[:256]!r} is {sent[0][:32]} {list(sent[1])}"
                raise RequestError(f"names: {shown}, but the served model {own}", "update_info")
        return self.path / name

    def add(self, tensors: Sequence[SentTensor], file: Path) -> None:
        self._files |= {each.name: file.name for each in tensors}

    def complete(self) -> None:
        """Adds a model folder's other files: the index, the configuration and quantizers' files."""
        (self.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self._files}))
        names = ["config.json", *(file.name for pattern in QUANTIZERS_FILES for file in self._base.glob(pattern))]
        for name in names:
            shutil.copyfile(self._base / name, self.path / name)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def linked(root: Path, folder: Path, number: int) -> Path:
    """Returns a folder of this server with hard links to a checked folder's files, so that the files survive that
    folder's removal.

    Returns the checked folder if the file system has no hard links or this process may not make them. Blocks, so
    call it on a separate thread.
    """
    own = root / f"{RECEIVED}{number}"
    shutil.rmtree(own, ignore_errors=True)  # of an earlier life of this process
    try:
        own.mkdir(mode=0o755)
        for file in folder.iterdir():
            if file.is_file():
                os.link(file.resolve(), own / file.name)
        if stamp_of(own) == stamp_of(folder):
            return own
    except (OSError, ModelError) as error:
        log.info("the files of %s are not linked, so they must stay: %s", folder, error)
    shutil.rmtree(own, ignore_errors=True)
    return folder


def last_received(root: Path) -> int:
    """Returns the highest number of these folders; 0 without any. After a restart the number must not be used again:
    instances may still read the folder.
    """
    numbers = (folder.name.removeprefix(RECEIVED) for folder in root.glob(f"{RECEIVED}*"))
    return max((int(each) for each in numbers if each.isascii() and each.isdigit() and len(each) < 10), default=0)


def remove_received(root: Path, but: Path) -> None:
    """Removes the folders of earlier updates; no instance reads them any more."""
    for folder in root.glob(f"{RECEIVED}*"):
        if folder != but and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
