"""Videos for GLM-4.1V and ERNIE 4.5 VL over HTTP and through the split, also when an instance dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.video_files import frames_of
from pd_cluster.media.video_inputs import VideoFrames
from tests.cluster.test_pictures import Stream, post, tokens
from tests.support.clip_kinds import CLIP_KINDS, Filmed, make_filming, reference_answer
from tests.support.clips import clip, data_url, encoded, file_of
from tests.support.cluster import LiveCluster

NUM_TOKENS = 16
FLAGS = ["--block-size=4", "--num-blocks=512", "--max-num-seqs=8", "--max-num-batched-tokens=16", "--max-model-len=500"]
FILM = clip(1, 9, 48, 40)
FILES = [file_of(FILM), file_of(FILM[::-1])]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def body_of(file: bytes, **fields: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": "ab"},
        {"type": "video_url", "video_url": {"url": data_url(file)}},
        {"type": "text", "text": "c"},
    ]
    more = {"max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": content}], **more, **fields}


@pytest.mark.parametrize(("name", "transport"), [*zip(CLIP_KINDS, ("shm", "dist"), strict=True)])
def test_both_legs(tmp_path: Path, name: str, transport: str) -> None:
    """Both legs are exact, also with `mm_processor_kwargs`, from prefix caches, and after decode was killed."""
    model = make_filming(tmp_path / "model", name)

    def expected(video: VideoFrames) -> list[int]:
        texts = [encoded("<|user|>ab"), encoded("c<|assistant|>")]
        return reference_answer(model, name, Filmed(texts, [video]), NUM_TOKENS)

    wanted = [expected(frames_of(file, FrameSampling())) for file in FILES]
    four = expected(frames_of(FILES[0], FrameSampling(4)))
    assert wanted[0] != wanted[1], "the frames' order must matter"
    assert four != wanted[0], "the number of frames must matter"
    with LiveCluster(tmp_path / "cluster", model, arguments=[*FLAGS, f"--kv-transport={transport}"]) as cluster:

        def ask(file: bytes, **fields: Any) -> list[int]:
            return tokens(post(cluster, body_of(file, **fields)))

        for _ in range(2):  # the second time from the prefix caches
            assert [ask(file) for file in FILES] == wanted
            assert ask(FILES[0], mm_processor_kwargs={"num_frames": 4}) == four
        cluster.await_received("decode-0")
        whole = ask(FILES[0], max_tokens=300, ignore_eos=True)
        stream = Stream(cluster, body_of(FILES[0], max_tokens=300, ignore_eos=True))
        stream.begun()
        cluster.kill("decode-0")
        assert stream.end() == whole
        cluster.restart("decode-0")
        assert [ask(file) for file in FILES] == wanted
        cluster.assert_home()
