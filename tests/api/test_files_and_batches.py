"""Files and batches over two API processes and two tenants, with OpenAI's client as in its documentation."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.api.conftest import KEYS, MAX_FILE_MIB, METRICS_KEY
from tests.support.cluster import LiveCluster
from tests.support.documented import answer_validator

CHAT_URL, TEXT_URL, RESPONSES_URL, EMBEDDINGS_URL = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/embeddings"),
)
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    CHAT_URL: CHAT,
    TEXT_URL: {"prompt": "once upon", "max_tokens": 5, "temperature": 0},
    RESPONSES_URL: {"input": "hello", "max_output_tokens": 5, "temperature": 0},
    EMBEDDINGS_URL: {"input": "hello"},
}
DEADLINE_S = 60.0
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


def lines(number: int, url: str = CHAT_URL, **fields: Any) -> bytes:
    found = [
        {
            "custom_id": f"request-{at}",
            "method": "POST",
            "url": url,
            "body": {"model": "tiny", **BODIES[url], **fields},
        }
        for at in range(number)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("requests.jsonl", io.BytesIO(data)), purpose="batch").id


def run(client: openai.OpenAI, data: bytes, endpoint: Any = CHAT_URL) -> Batch:
    made = client.batches.create(
        completion_window="24h", endpoint=endpoint, input_file_id=upload(client, data), metadata={"about": "a test"}
    )
    return ended(client, made.id)


def ended(client: openai.OpenAI, batch_id: str) -> Batch:
    end_s = time.monotonic() + DEADLINE_S
    while (batch := client.batches.retrieve(batch_id)).status in (
        "validating",
        "in_progress",
        "finalizing",
        "cancelling",
    ):
        assert time.monotonic() < end_s, batch
        time.sleep(0.05)
    return batch


def rows(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_as_the_documentation_does_it(one: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "batchinput.jsonl"
    path.write_bytes(lines(5))
    with path.open("rb") as opened:
        file = one.files.create(file=opened, purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == (path.name, path.stat().st_size, "batch")
    created = one.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "nightly"}
    )
    assert created.status == "validating"
    assert created.expires_at == created.created_at + 24 * 3600
    batch = ended(one, created.id)
    assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"job": "nightly"})
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 5, 0)
    expected = one.chat.completions.create(model="tiny", **CHAT)  # type: ignore[call-overload]
    found = rows(one, batch.output_file_id)
    assert sorted(row["custom_id"] for row in found) == [f"request-{at}" for at in range(5)]
    for row in found:
        assert (row["error"], row["response"]["status_code"]) == (None, 200)
        assert row["response"]["body"]["choices"][0]["message"]["content"] == expected.choices[0].message.content
    assert batch.id in [each.id for each in one.batches.list(limit=10)]
    key = {"Authorization": f"Bearer {METRICS_KEY}"}
    metrics = httpx.get(str(one.base_url.join("/metrics")), headers=key, trust_env=False).text
    told = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith("pd_cluster:batch_lines{")]
    assert told == ["0.0"] * 3


@pytest.mark.parametrize("url", [TEXT_URL, RESPONSES_URL, EMBEDDINGS_URL])
def test_each_endpoint(one: openai.OpenAI, url: str) -> None:
    batch = run(one, lines(2, url), url)
    assert batch.status == "completed", batch
    assert len(rows(one, batch.output_file_id)) == 2


def test_requests_with_errors_are_in_the_error_file(one: openai.OpenAI) -> None:
    data = (
        lines(1)
        + lines(1, max_tokens=-1).replace(b"request-0", b"bad")
        + lines(1, stream=True).replace(b"request-0", b"s")
    )
    batch = run(one, data + lines(1, model="other").replace(b"request-0", b"model"))
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 1, 3)
    assert [row["custom_id"] for row in rows(one, batch.output_file_id)] == ["request-0"]
    found = {row["custom_id"]: row for row in rows(one, batch.error_file_id)}
    assert {name: row["response"]["status_code"] for name, row in found.items()} == {"bad": 400, "s": 400, "model": 404}
    assert "max_tokens" in found["bad"]["error"]["message"]


def test_an_invalid_file_fails_with_its_lines(one: openai.OpenAI) -> None:
    batch = run(one, lines(2) + lines(1), CHAT_URL)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [("duplicate_custom_id", 3)]


def test_a_batch_is_cancelled(one: openai.OpenAI) -> None:
    file_id = upload(one, lines(3000, max_tokens=60, ignore_eos=True))
    made = one.batches.create(completion_window="24h", endpoint=CHAT_URL, input_file_id=file_id)
    with pytest.raises(openai.ConflictError, match=made.id):
        one.files.delete(file_id)
    assert one.batches.cancel(made.id).status == "cancelling"
    batch = ended(one, made.id)
    assert batch.status == "cancelled"
    assert one.batches.cancel(made.id).status == "cancelled"
    one.files.delete(file_id)
    completed = run(one, lines(1))
    with pytest.raises(openai.ConflictError, match="completed"):
        one.batches.cancel(completed.id)


def test_files_are_their_owners_alone(one: openai.OpenAI, two: openai.OpenAI) -> None:
    batch = run(one, lines(1))
    assert batch.output_file_id is not None
    for file_id in (batch.input_file_id, batch.output_file_id, "file-" + "0" * 32, "..%2ffiles.sqlite3", "%00"):
        for ask in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(file_id)
    for ask in (two.batches.retrieve, two.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.NotFoundError):
        two.batches.create(completion_window="24h", endpoint=CHAT_URL, input_file_id=batch.input_file_id)
    assert batch.input_file_id not in [file.id for file in two.files.list()]
    with pytest.raises(openai.BadRequestError, match="purpose"):
        one.batches.create(completion_window="24h", endpoint=CHAT_URL, input_file_id=batch.output_file_id)


def test_files_are_listed_read_and_removed(one: openai.OpenAI) -> None:
    made = [upload(one, b"x" * at) for at in range(1, 4)]
    listed = [file.id for file in one.files.list(purpose="batch", limit=2, order="desc")]  # the client loads all pages
    assert [each for each in listed if each in made] == made[::-1]
    assert one.files.content(made[2]).content == b"xxx"
    assert one.files.retrieve(made[1]).bytes == 2
    for file_id in made:
        assert one.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            one.files.content(file_id)
    short = one.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert short.expires_at == short.created_at + 3600


def test_uploads_that_are_refused(one: openai.OpenAI, guarded: LiveCluster) -> None:
    for purpose in ("fine-tune", "vision"):
        with pytest.raises(openai.BadRequestError, match="kept for batches only"):
            one.files.create(file=b"x", purpose=purpose)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="3600 to 2592000"):
        one.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 60})
    large = b"x" * ((MAX_FILE_MIB << 20) + 1)
    with pytest.raises(openai.APIStatusError) as error:
        one.files.create(file=large, purpose="batch")
    assert error.value.status_code == 413
    assert "--max-file-size" in error.value.message
    assert one.files.create(file=large[:-1], purpose="batch").bytes == MAX_FILE_MIB << 20

    headers = {"Authorization": f"Bearer {KEYS['one']}"}
    url = f"{guarded.url}/v1/files"

    def in_pieces() -> Iterator[bytes]:
        head, tail = b"--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n", b"\r\n--b--\r\n"
        yield head
        for _ in range(MAX_FILE_MIB + 2):
            yield b"y" * (1 << 20)
        yield tail

    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    with httpx.Client(trust_env=False, timeout=60) as client:
        assert client.post(url, json={}, headers=headers).status_code == 400
        assert client.post(url, content=in_pieces(), headers=headers | kind).status_code == 413
        form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
        assert client.post(url, **form).status_code == 401  # type: ignore[arg-type]
        page = headers | {"Origin": "https://evil.example"}
        assert client.post(url, **form, headers=page).status_code == 403  # type: ignore[arg-type]
        page = headers | {"Origin": "https://a.example"}
        assert client.post(url, **form, headers=page).status_code == 200  # type: ignore[arg-type]


def test_batches_that_are_refused(one: openai.OpenAI) -> None:
    file_id = upload(one, lines(1))
    for fields in (
        {"endpoint": "/v1/moderations"},
        {"completion_window": "1h"},
        {"metadata": {"x" * 65: "y"}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
    ):
        asked: Any = {"completion_window": "24h", "endpoint": CHAT_URL, "input_file_id": file_id, **fields}
        with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
            one.batches.create(**asked)
    with pytest.raises(openai.BadRequestError, match="limit"):
        one.batches.list(limit=101)


def test_answers_are_as_documented(one: openai.OpenAI, guarded: LiveCluster) -> None:
    batch = run(one, lines(1))
    headers = {"Authorization": f"Bearer {KEYS['one']}"}
    with httpx.Client(base_url=guarded.url, headers=headers, trust_env=False) as client:
        document = client.get("/openapi.json").json()
        for path, name in (
            *(("/v1/files", "FileList"), (f"/v1/files/{batch.input_file_id}", "FileObject")),
            *(("/v1/batches", "BatchList"), (f"/v1/batches/{batch.id}", "BatchObject")),
        ):
            answer = client.get(path)
            assert answer.status_code == 200, answer.text
            answer_validator(document, {"$ref": f"#/components/schemas/{name}"}).validate(answer.json())
        paths = document["paths"]
        assert {"post", "get"} == paths["/v1/files"].keys() == paths["/v1/batches"].keys()
        assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]


def test_without_a_folder_the_routes_say_so(client: openai.OpenAI) -> None:
    for ask in (client.files.list, client.batches.list):
        with pytest.raises(openai.NotFoundError, match="--files-dir"):
            ask()
    with pytest.raises(openai.NotFoundError, match="--files-dir"):
        client.files.create(file=b"x", purpose="batch")
