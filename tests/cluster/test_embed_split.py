"""Vectors from a prefill instance of a split cluster: those of one process, with no decode leg."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pd_cluster import LLM, PoolingParams, SamplingParams
from pd_cluster.cluster.members.instance import Instance
from pd_cluster.engine.worker import LOAD_S
from pd_cluster.types import Pooling
from tests.support.checkpoints import reference_greedy
from tests.support.vectors import reference_vector

PROMPTS = [[5, 6, 7, 8], [9] * 40, [10, 11], list(range(20, 90))]


async def heartbeats_of(*instances: Instance) -> None:
    """Waits until each has sent the load of after now."""
    loop = asyncio.get_running_loop()
    now_s = loop.time() + LOAD_S
    async with asyncio.timeout(30):
        while any(instance.heard_s <= now_s for instance in instances):
            await asyncio.sleep(0.05)


def test_a_prefill_instance_embeds_and_no_decode_leg_is_taken(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("llama")
    settings = {"num_blocks": 64, "max_model_len": 256}
    with LLM(str(model), **settings) as one:  # type: ignore[arg-type]
        expected = [output.outputs.embedding for output in one.embed(PROMPTS)]
    with LLM(str(model), prefill=1, decode=1, **settings) as llm:  # type: ignore[arg-type]
        router = llm._offline.service.router
        prefill, decode = sorted(router.membership.instances, key=lambda each: each.role == "decode")
        outputs = llm.embed(PROMPTS)
        assert [output.outputs.embedding for output in outputs] == expected
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert (output.prompt_token_ids, output.error_msg) == (prompt, None)
            assert np.allclose(output.outputs.embedding, reference_vector(model, prompt, Pooling()), atol=1e-5)
        few = llm.encode(PROMPTS, PoolingParams(dimensions=7), pooling_task="embed")
        assert [output.outputs.data.shape for output in few] == [(7,)] * 4
        llm._offline.run(heartbeats_of(prefill, decode))
        assert prefill.load.num_steps > 0
        assert (prefill.load.num_handed_over, decode.load.num_landings, decode.load.num_steps) == (0, 0, 0)
        assert (prefill.num_outstanding, decode.num_outstanding) == (0, 0)
        assert (prefill.load.num_held_blocks, decode.load.num_held_blocks) == (0, 0)
        greedy = SamplingParams(temperature=0, max_tokens=8)
        (answer,) = llm.generate(prompt_token_ids=PROMPTS[:1], sampling_params=greedy)
        assert list(answer.outputs[0].token_ids) == reference_greedy(model, PROMPTS[0], 8)
        llm._offline.run(heartbeats_of(prefill, decode))
        assert (prefill.load.num_handed_over, decode.load.num_landings) == (1, 1)
        assert decode.load.num_steps > 0
