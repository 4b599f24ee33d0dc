"""FastDeploy's two picture examples as typed, with only import lines and the model's path changed.

They run on a simulated host whose network has the server named by their URL, with a public address.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import public_host
from tests.support.certificates import make_certificate
from tests.support.picture_kinds import make_kind
from tests.support.pictures import file_of, picture

HOST, FILE = "paddlenlp.bj.bcebos.com", "datasets/paddlemix/demo_images/example2.jpg"
PICTURE = picture(3, 48, 32)

CHAT = """
from pd_cluster.fastdeploy.entrypoints.llm import LLM
# 加载模型
llm = LLM(model=PATH, tensor_parallel_size=1, max_model_len=32768, enable_mm=True, limit_mm_per_prompt={"image": 100},
          reasoning_parser="ernie-45-vl")
outputs = llm.chat(
    messages=[
        {"role": "user", "content": [ {"type": "image_url", "image_url": {"url": "https://paddlenlp.bj.bcebos.com/datasets/paddlemix/demo_images/example2.jpg"}},
                                     {"type": "text", "text": "图中的文物属于哪个年代"}]}
    ],
    chat_template_kwargs={"enable_thinking": False})
# 输出结果
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs.text
    reasoning_text = output.outputs.reasoning_content
"""

GENERATE = """
import io
import requests
from PIL import Image

from pd_cluster.fastdeploy.entrypoints.llm import LLM
from pd_cluster.fastdeploy.engine.sampling_params import SamplingParams
from pd_cluster.fastdeploy.input.ernie_tokenizer import ErnieBotTokenizer

tokenizer = ErnieBotTokenizer.from_pretrained(PATH)

messages = [
    {
        "role": "user",
        "content": [
            {"type":"image_url", "image_url": {"url":"https://paddlenlp.bj.bcebos.com/datasets/paddlemix/demo_images/example2.jpg"}},
            {"type":"text", "text":"图中的文物属于哪个年代"}
        ]
     }
]

prompt = tokenizer.apply_chat_template(messages, tokenize=False)
images, videos = [], []
for message in messages:
    content = message["content"]
    if not isinstance(content, list):
        continue
    for part in content:
        if part["type"] == "image_url":
            url = part["image_url"]["url"]
            image_bytes = requests.get(url).content
            img = Image.open(io.BytesIO(image_bytes))
            images.append(img)
        elif part["type"] == "video_url":
            url = part["video_url"]["url"]
            video_bytes = requests.get(url).content
            videos.append({
                "video": video_bytes,
                "max_frames": 30
            })

sampling_params = SamplingParams(temperature=0.1, max_tokens=6400)
llm = LLM(model=PATH, tensor_parallel_size=1, max_model_len=32768, enable_mm=True, limit_mm_per_prompt={"image": 100},
          reasoning_parser="ernie-45-vl")
outputs = llm.generate(prompts={
    "prompt": prompt,
    "multimodal_data": {
        "image": images,
        "video": videos
    }
}, sampling_params=sampling_params)

# 输出结果
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs.text
    reasoning_text = output.outputs.reasoning_content
"""


SHOW = """
import json
found = {"text": generated_text, "prompt": list(output.prompt_token_ids), "error": output.error_msg}
with open(OUT, "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kind(tmp_path_factory.mktemp("model"), "ernie4_5_vl_moe", max_position_embeddings=32768)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", [CHAT, GENERATE], ids=["chat", "generate"])
def test_an_example_with_a_picture(tmp_path: Path, path: Path, program: str) -> None:
    found, asked = run(tmp_path, path, program)
    assert found["error"] is None
    assert found["text"]
    assert found["prompt"].count(300) == 12, "expected 1024 pixels or fewer, 64 per token"
    assert set(asked) == {f"/{FILE}"}


def run(folder: Path, model: Path, program: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the program's results, and the files that it fetched."""
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    made = make_certificate(folder, "server", f"DNS:{HOST}")
    assert (made.certfile.name, made.keyfile.name) == ("server.pem", "server.key")
    file = folder / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(file_of(PICTURE, "JPEG"))
    typed = folder / "example.py"
    typed.write_text(f"PATH, OUT = {str(model)!r}, {str(folder / 'found')!r}\n{program}{SHOW}", encoding="utf-8")
    where = {**os.environ, "FD_LOG_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, public_host.__file__, str(folder), HOST, str(typed)]
    done = subprocess.run(
        ["unshare", "--net", "--mount", *command], env=where, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "found").read_text()), (folder / "asked").read_text().splitlines()
