"""The commands of `LLM` that replace weights, in the caller's process and in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.errors import PdClusterError
from tests.support.engines import assert_all_same
from tests.support.weight_versions import Trainer, make_version

Checkpoints = Callable[..., Path]
PROMPT = [7] * 40
PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


def tokens_of(llm: LLM) -> list[int]:
    (output,) = llm.generate(prompt_token_ids=PROMPT, sampling_params=PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("processes", [{}, pytest.param({"prefill": 1, "decode": 1}, marks=pytest.mark.slow)])
def test_a_folder_and_a_trainer(checkpoint: Checkpoints, tmp_path: Path, processes: dict[str, int]) -> None:
    base = checkpoint("llama")
    folders = [make_version(base, tmp_path / f"step-{seed}", seed) for seed in (1, 2)]
    with LLM(str(base), num_blocks=64, **processes) as llm:
        before = tokens_of(llm)
        assert llm.get_weight_version() == "default"
        llm.start_weight_update()
        llm.update_weights({"update_info": {"folder": str(folders[0])}})
        assert llm.finish_weight_update() == "step-1"
        tokens = tokens_of(llm)
        assert_all_same(folders[0], [PROMPT], [tokens], 6)
        assert tokens != before
        trainer = Trainer(free_port_pair(), folders[1])
        try:
            llm.init_weight_transfer_engine({"init_info": trainer.info})
            llm.start_weight_update("keep")
            llm.update_weights(trainer.part(0))
            assert llm.finish_weight_update("sent") == "sent" == llm.get_weight_version()
        finally:
            trainer.end()
        assert_all_same(folders[1], [PROMPT], [tokens_of(llm)], 6)
        llm.start_weight_update()
        for request, why in (({"update_info": {}}, "give a folder"), ({"update": {}}, "unknown field")):
            with pytest.raises(PdClusterError, match=why):
                llm.update_weights(request)
        with pytest.raises(PdClusterError, match="there is no folder"):
            llm.update_weights({"update_info": {"folder": str(tmp_path / "none")}})
        with pytest.raises(PdClusterError, match="no weights have been checked"):
            llm.finish_weight_update()
