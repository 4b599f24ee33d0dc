"""Default sampling parameters of requests: generation_config.json and the operator's overrides.

--generation-config, as in vLLM, names the source: `auto` is the model folder, a path is another folder, and with `vllm`
no file provides sampling defaults. The values of --override-generation-config take precedence over the source. Other
keys of a file are ignored; a key of the override must be one of `KNOWN`. Knows nothing of requests.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import ModelError, called
from pd_cluster.settings.sampling_override import KNOWN, Number, Override

NEUTRAL = "vllm"  # the value of --generation-config for which no file is read


def sampling_defaults(checkpoint: Checkpoint, source: str, override: Mapping[str, Number | None]) -> dict[str, Number]:
    """Maps names of `KNOWN` to values. A null in the override removes the file's value.

    Raises ModelError for a value that no request could have.
    """
    found = {} if source == NEUTRAL else _of_file(checkpoint)
    return {name: value for name, value in {**found, **override}.items() if value is not None}


def _of_file(checkpoint: Checkpoint) -> Override:
    own = checkpoint.generation_config
    found = {name: own[name] for name in KNOWN if own.get(name) is not None}
    for name, value in found.items():
        if not KNOWN[name].accepts(value):
            raise ModelError(
                f"{checkpoint.generation_file}: {name} {reprlib.repr(value)}: expected {KNOWN[name].expected}; "
                f"change it, or start with {called('generation_config')} {NEUTRAL}"
            )
    return found
