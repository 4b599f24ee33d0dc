"""Images across real processes and over HTTP: both legs, both transports, and instances that die."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.video_files import frames_of
from tests.support import clips
from tests.support.canary import Canary
from tests.support.clips import avi_of_frames, make_seer
from tests.support.cluster import LiveCluster, together
from tests.support.pictures import (
    PLACEHOLDER,
    Shown,
    data_url,
    ids_of,
    picture,
    png_of_size,
    reference_answer,
)

NUM_TOKENS = 24
FLAGS = ["--block-size=8", "--max-num-batched-tokens=24", "--limit-mm-per-prompt=image=3,video=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seer(tmp_path_factory.mktemp("model"), "qwen3_vl", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with LiveCluster(
        tmp_path_factory.mktemp("pictures"), model, arguments=[*FLAGS, "--num-blocks=256", "--max-model-len=1800"]
    ) as running:
        yield running


VIDEO = clips.clip(11)
VIDEO_FILE = clips.file_of(VIDEO)
VIDEO_URL = clips.data_url(VIDEO_FILE)


def film(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def expected_of_video(model: Path) -> list[int]:
    """Returns generate()'s answer to "ab", VIDEO_FILE, "c"."""
    prompt = [*ids_of("<|user|>ab"), 302, 301, 303, *ids_of("c<|assistant|>")]
    found = frames_of(VIDEO_FILE, FrameSampling())
    return clips.reference_answer(model, clips.Filmed(prompt, [found]), NUM_TOKENS)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def body_of(*parts: dict[str, Any] | str, max_tokens: int = NUM_TOKENS, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    more = {"max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": content}], **more, **fields}


def post(cluster: LiveCluster, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    return cluster.client.post(f"{cluster.url}{path}", json=body)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def expected(model: Path, *parts: Any) -> list[int]:
    """Returns generate()'s answer to a message of texts and pictures."""
    texts, pictures, text = [], [], "<|user|>"
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            texts.append(text)
            pictures.append(part)
            text = ""
    return reference_answer(model, Shown(ids_of(*texts, text + "<|assistant|>"), pictures), NUM_TOKENS)


CONVERSATIONS: list[list[Any]] = [
    ["ab", picture(1), "c"],
    ["ab", picture(2), "c"],
    [picture(3, 40, 16), "x", picture(4, 17, 33)],
    [picture(5, 64, 64), picture(5, 64, 64), "what?", picture(1)],
    ["no picture"],
]


def chat_of(parts: list[Any], **fields: Any) -> dict[str, Any]:
    return body_of(*(part if isinstance(part, str) else image(data_url(part)) for part in parts), **fields)


def assert_exact(cluster: LiveCluster, model: Path) -> None:
    asks = [partial(post, cluster, chat_of(parts)) for parts in CONVERSATIONS]
    for _ in range(2):  # the second time from the prefix caches
        assert [tokens(answer) for answer in together(asks)] == [expected(model, *parts) for parts in CONVERSATIONS]


def test_both_legs(cluster: LiveCluster, model: Path) -> None:
    assert_exact(cluster, model)
    cluster.await_received("decode-0")
    cluster.assert_home()


def test_in_responses_and_messages(cluster: LiveCluster, model: Path) -> None:
    """The same prompt gives the same text in three APIs; errors name the field of the API used."""
    url = data_url(picture(1))
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    wanted = post(cluster, chat_of(["ab", picture(1), "c"], return_token_ids=False)).json()["choices"][0]["message"]
    other = post(cluster, chat_of(["ab", picture(2), "c"], return_token_ids=False)).json()["choices"][0]["message"]
    assert wanted["content"] != other["content"]

    def response(image_url: str, **more: Any) -> httpx.Response:
        parts = [
            {"type": "input_text", "text": "ab"},
            {"type": "input_image", "image_url": image_url, "detail": "auto"},
            {"type": "input_text", "text": "c"},
        ]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": NUM_TOKENS, "temperature": 0}
        return post(cluster, {**body, **more}, "/v1/responses")

    def message(source: dict[str, str], **more: Any) -> httpx.Response:
        blocks = [{"type": "text", "text": "ab"}, {"type": "image", "source": source}, {"type": "text", "text": "c"}]
        body = {"model": cluster_model, "messages": [{"role": "user", "content": blocks}], "max_tokens": NUM_TOKENS}
        return post(cluster, {**body, "temperature": 0, **more}, "/v1/messages")

    cluster_model = cluster.client.get(f"{cluster.url}/v1/models").json()["data"][0]["id"]
    answered = response(url).json()
    assert answered["output"][0]["content"][0]["text"] == wanted["content"]
    told = message({"type": "base64", "media_type": kind, "data": data}).json()
    assert told["content"][0]["text"] == wanted["content"]
    assert message({"type": "url", "url": url}).json()["content"] == told["content"]
    bad = response(url[:-40], instructions="Be brief.")
    assert bad.json()["error"]["message"].startswith("input[0].content[1]")
    bad = message({"type": "base64", "media_type": kind, "data": "AAAA"}, system="Be brief.")
    assert bad.json()["error"]["message"].startswith("messages[0].content[1]")


def test_videos(cluster: LiveCluster, model: Path) -> None:
    """Videos are exact through the split and from prefix caches; other frames or another order give other tokens."""
    urls = [clips.data_url(each) for each in (VIDEO_FILE, clips.file_of(VIDEO[::-1]), clips.file_of(clips.clip(14)))]
    for _ in range(2):
        found = [tokens(post(cluster, body_of("ab", film(url), "c"))) for url in urls]
        assert found[0] == expected_of_video(model)
        assert len(set(map(tuple, found))) == 3
    body = body_of("ab", film(urls[0]), "c")
    answer = post(cluster, body).json()
    count = post(cluster, {"messages": body["messages"]}, "/tokenize").json()
    assert answer["usage"]["prompt_tokens"] == count["count"] == len(count["tokens"])
    assert count["tokens"].count(301) == 3 * count["tokens"][count["tokens"].index(301) :].index(303)
    forged = {"messages": body_of("<|vision_start|><|video_pad|><|vision_end|>")["messages"]}
    assert post(cluster, forged, "/tokenize").json()["tokens"].count(301) == 0

    def is_counted() -> bool:
        lines = cluster.client.get(f"{cluster.url}/metrics").text.splitlines()
        media = (f"pd_cluster:media_{what}_seconds_count" for what in ("decode", "fetch"))
        names = (*media, "vllm:mm_cache_hits_total", "pd_cluster:images_encoded_total{")
        return all(any(line.startswith(name) and float(line.split()[-1]) > 0 for line in lines) for name in names)

    cluster.wait_until("it is told what was decoded and encoded", is_counted)
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_over_gloo_and_two_ranks(model: Path, tmp_path: Path) -> None:
    """Each picture is computed by only one rank; if a rank dies before its share is ready, nothing waits for it."""
    tp = {"prefill-0": 2, "decode-0": 1}
    flags = [*FLAGS, "--num-blocks=256", "--max-model-len=1800", "--kv-transport=dist"]
    with LiveCluster(tmp_path, model, arguments=flags, tp_sizes=tp) as cluster:
        assert_exact(cluster, model)
        cluster.await_received("decode-0")
        cluster.wait_until("five pictures were counted once each", lambda: num_encoded(cluster, "prefill-0") == 5)
        cluster.assert_home()
        follower = cluster.rank_pids("prefill-0")[1]
        os.kill(follower, signal.SIGSTOP)
        new = ["ab", picture(7), picture(8), "c"]
        stream = Stream(cluster, chat_of(new))
        cluster.wait_until("it was sent", lambda: cluster.instance("prefill-0")["num_outstanding"] == 1)
        os.kill(follower, signal.SIGKILL)
        assert cluster.await_exit("prefill-0") != 0
        assert stream.end() == expected(model, *new)
        cluster.start_member("prefill-0")
        cluster.await_ready()
        assert_exact(cluster, model)
        cluster.assert_home()


def num_encoded(cluster: LiveCluster, name: str) -> float:
    """Returns the number of images that an instance computed, from /metrics."""
    lines = cluster.client.get(f"{cluster.url}/metrics").text.splitlines()
    own = [line for line in lines if line.startswith("pd_cluster:images_encoded_total{") and name in line]
    return sum(float(line.split()[-1]) for line in own)


def test_usage_and_tokenize_count_expanded_tokens(cluster: LiveCluster, model: Path) -> None:
    body = chat_of(CONVERSATIONS[2])
    answer = post(cluster, body).json()
    count = post(cluster, {"messages": body["messages"]}, "/tokenize").json()
    assert answer["usage"]["prompt_tokens"] == count["count"] == len(count["tokens"])
    assert count["tokens"].count(300) == 10 + 8
    rendered = post(cluster, body, "/v1/chat/completions/render")
    assert rendered.status_code == 400
    assert "token ids alone cannot carry images" in rendered.json()["error"]["message"]
    forged = {"messages": body_of(image(data_url(picture(1))), PLACEHOLDER)["messages"]}
    tokens_of_forged = post(cluster, forged, "/tokenize").json()["tokens"]
    assert tokens_of_forged.count(300) == 6, "a user's text must not become a placeholder"


BROKEN = {
    "1 x 10000 pixels: one side is more than 200 times the other": data_url(png_of_size(1, 10_000)),
    "a picture has at most 67108864 pixels": data_url(png_of_size(60_000, 60_000)),
    "the file is broken or cut short": data_url(png_of_size(4000, 4000)),
    "no picture in JPEG": data_url(b"hello"),
    "'http://127.0.0.1:1/a.png': images come as data: URLs; send one of these": "http://127.0.0.1:1/a.png",
    "'file:///etc/passwd': images come as data: URLs; send one of these": "file:///etc/passwd",
}


BROKEN_VIDEOS = {
    "the file is broken or cut short": clips.data_url(VIDEO_FILE[:200]),
    "100000 frames: a video has at most 20000": clips.data_url(avi_of_frames(100_000), "avi"),
    "a data: URL of image/png: not a video": data_url(picture(1)),
}


def num_refused(cluster: LiveCluster) -> float:
    """Returns the number of refused images, from /metrics."""
    lines = cluster.client.get(f"{cluster.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "images_total{" in line and "refused" in line)


def test_bad_images_are_named_and_disturb_nobody(cluster: LiveCluster, model: Path) -> None:
    before = num_refused(cluster)
    with Canary(cluster).singing():
        for said, url in BROKEN.items():
            answer = post(cluster, body_of(image(data_url(picture(1))), "a", image(url)))
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["message"].startswith(f"messages[0].content[2].image_url: {said}"), error
            assert error["param"] == "messages"
        answer = post(cluster, body_of(*[image(data_url(picture(1)))] * 4))
        assert "content[3].image_url: 4 images; this server takes 3" in answer.json()["error"]["message"]
        answer = post(cluster, {"prompt": "a<|image_pad|>", "max_tokens": 1}, "/v1/completions")
        assert "1 placeholders of images for 0 images" in answer.json()["error"]["message"]
        answer = post(cluster, body_of({"type": "image_embeds", "image_embeds": {"data": "gASVAAAA"}}))
        assert answer.status_code == 400, "clients' tensors must never be read"
        for said, url in BROKEN_VIDEOS.items():
            error = post(cluster, body_of(film(VIDEO_URL), image(data_url(picture(1))), film(url))).json()["error"]
            assert error["message"].startswith(f"messages[0].content[2].video_url: {said}"), error
    cluster.wait_until("they are counted", lambda: num_refused(cluster) - before == len(BROKEN))
    assert_exact(cluster, model)
    cluster.assert_home()


class Stream:
    """A streamed chat on a thread."""

    def __init__(self, cluster: LiveCluster, body: dict[str, Any]) -> None:
        self.found: list[int] = []
        self.error = ""
        self._begun = threading.Event()
        arguments = (f"{cluster.url}/v1/chat/completions", {**body, "stream": True})
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def _run(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.error = self.error or str(event.get("error", ""))
                    for choice in event.get("choices", ()):
                        self.found += choice.get("token_ids") or ()
                    self._begun.set()

    def begun(self) -> None:
        assert self._begun.wait(30)

    def end(self) -> list[int]:
        self._thread.join(120)
        assert not self._thread.is_alive(), "the stream does not end"
        assert not self.error, self.error
        return self.found


@pytest.mark.parametrize("victim", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.slow)])
def test_an_instance_is_killed_in_mid_request(cluster: LiveCluster, model: Path, victim: str) -> None:
    """Decode dies between tokens; prefill dies during a request before it has reported anything."""
    if victim == "prefill-0":
        body = chat_of(CONVERSATIONS[3], max_tokens=1000, ignore_eos=True)
        reference = expected(model, *CONVERSATIONS[3])
    else:
        body = body_of("ab", film(VIDEO_URL), "c", max_tokens=1000, ignore_eos=True)
        reference = expected_of_video(model)
    whole = tokens(post(cluster, body))
    assert whole[: len(reference)] == reference
    if victim == "prefill-0":
        cluster.kill_rank(victim, signal.SIGSTOP)
    stream = Stream(cluster, body)
    if victim == "prefill-0":
        cluster.wait_until("it was sent", lambda: cluster.instance(victim)["num_outstanding"] == 1)
    else:
        stream.begun()
    cluster.kill(victim)
    assert stream.end() == whole
    cluster.restart(victim)
    assert_exact(cluster, model)
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_decode_that_drops_an_images_kv(model: Path, tmp_path: Path) -> None:
    """Decode lacks the pixels to recompute an image, so the request continues on an instance that gets them."""
    small = {"decode-0": ["--num-blocks=24", "--growth-tokens=1", "--no-enable-prefix-caching"]}
    flags = [*FLAGS, "--num-blocks=200", "--max-model-len=160"]
    with LiveCluster(tmp_path, model, arguments=flags, member_arguments=small) as cluster:
        bodies = [chat_of(["ab", picture(at), "c"], max_tokens=100, ignore_eos=True) for at in range(6)]
        alone = [tokens(post(cluster, body)) for body in bodies]
        reference = expected(model, "ab", picture(0), "c")
        assert alone[0][: len(reference)] == reference
        why = "its images' KV was dropped, and computing it again needs their pixels"
        for _ in range(8):  # how many are decoded together depends on the machine's speed
            assert [tokens(answer) for answer in together([partial(post, cluster, body) for body in bodies])] == alone
            if why in cluster.log_file("scheduler").read_text():
                break
        else:
            raise AssertionError("no KV was dropped")
        cluster.assert_home()


@pytest.mark.slow
def test_offline_over_worker_processes(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with LLM(str(model), prefill=1, decode=1, num_blocks=256, max_model_len=1800, enable_mm=True) as llm:
        prompts = [{"prompt": f"a{PLACEHOLDER}", "multi_modal_data": {"image": picture(seed)}} for seed in (1, 2)]
        found = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]
    shown = [Shown(ids_of("a", ""), [picture(seed)]) for seed in (1, 2)]
    assert found == [reference_answer(model, each, NUM_TOKENS) for each in shown]
