"""Finds a model's files in a folder or on the Hugging Face hub. Files of the hub are fetched once and then cached.

Works without torch; huggingface_hub is imported only for a model that is not a folder.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from pd_cluster.checkpoints.plain_files import read_plain
from pd_cluster.checkpoints.sentencepiece import is_made
from pd_cluster.checkpoints.weight_files import INDEX
from pd_cluster.errors import ModelError, called

log = logging.getLogger(__name__)

# The files to fetch: no code, and weights in one format only.
WEIGHTS = "*.safetensors"
LEFT_OUT = ("*/*", "consolidated*")  # other formats of the same weights
PATTERNS = ("*.json", WEIGHTS, "*.jinja", "*.model")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def resolve_model(
    model: str,
    revision: str = "",
    download_dir: str = "",
    flag: str = called("model"),
    needs_weights: bool = True,
    revision_flag: str = called("revision"),
) -> Path:
    """Returns the folder, or the hub model's folder in the local cache, after fetching missing files.

    `revision`: a branch, tag or commit of the hub's model; a fetched branch is not updated.
    `download_dir` replaces the hub's own cache. Raises ModelError.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision:
            why = f"{flag} {model} is a folder, which has one version; leave it out"
            raise ModelError(f"{revision_flag} {revision}: {why}")
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelError(f"{flag} {model}: no such folder")
    patterns = PATTERNS if needs_weights else tuple(each for each in PATTERNS if each != WEIGHTS)
    found = _cached(model, revision, download_dir, patterns)
    if found is not None and _is_whole(found, needs_weights):
        return found
    named = f"{model}, revision {revision}" if revision else model
    if any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in OFFLINE):
        have = "no model of that name" if found is None else "not all its files"
        raise ModelError(
            f"{flag} {named}: no such folder, and {have} in the local Hugging Face cache; {OFFLINE[0]} keeps it from "
            f"being fetched"
        )
    return _fetched(model, revision, download_dir, patterns, f"{flag} {named}")


def _cached(model: str, revision: str, download_dir: str, patterns: tuple[str, ...]) -> Path | None:
    """Returns the cached folder; None if it is missing, or incomplete as far as the hub's library can tell."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        place = snapshot_download(
            model,
            revision=revision or None,
            cache_dir=download_dir or None,
            local_files_only=True,
            allow_patterns=list(patterns),
            ignore_patterns=list(LEFT_OUT),
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return Path(place)


def _is_whole(path: Path, needs_weights: bool) -> bool:
    """Whether the download is complete."""
    if not needs_weights:
        return (path / "tokenizer.json").exists() or is_made(path)
    if not (path / "config.json").exists():
        return False
    index = path / INDEX
    if not index.exists():
        return any(path.glob(WEIGHTS))
    try:
        files = set(json.loads(read_plain(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ModelError):
        return True  # the index is malformed, which its reader reports later
    return all((path / name).exists() for name in files)


def _fetched(model: str, revision: str, download_dir: str, patterns: tuple[str, ...], named: str) -> Path:
    """Fetches a model. Other processes of the host that need the same files wait meanwhile. Raises ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    log.info("fetching %s from the hub", named.partition(" ")[2])
    try:
        place = snapshot_download(
            model,
            revision=revision or None,
            cache_dir=download_dir or None,
            allow_patterns=list(patterns),
            ignore_patterns=list(LEFT_OUT),
        )
    except GatedRepoError:
        raise ModelError(f"{named}: access to it is restricted; set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelError(f"{named}: the hub has no such revision of it") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{named}: no such folder, and the hub has no model of that name (one that is private needs HF_TOKEN)"
        ) from None
    except HFValidationError:
        raise ModelError(f"{named}: no such folder, and no name that a hub's model could have") from None
    except Exception as error:  # several libraries may raise network errors
        raise ModelError(
            f"{named}: no such folder, not in the local Hugging Face cache, and it cannot be fetched: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from None
    path = Path(place)
    if WEIGHTS in patterns and not (path / "config.json").exists():
        raise ModelError(f"{named}: the hub's model has no config.json")
    return path
