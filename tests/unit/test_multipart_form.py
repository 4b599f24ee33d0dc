"""Multipart uploads in any pieces: the file's bytes, a few fields, and refusals of malformed forms."""

from __future__ import annotations

import random

import httpx
import pytest

from pd_cluster.errors import RequestError

pytest.importorskip("python_multipart")
from pd_cluster.api.files.multipart_form import DEFAULT_NAME, MAX_PARTS, MultipartForm, shown_name


def form_of(data: bytes, name: str = "in.jsonl", **fields: str) -> tuple[str, bytes]:
    request = httpx.Request("POST", "http://x/", data=fields, files={"file": (name, data)})
    return request.headers["content-type"], request.read()


@pytest.mark.parametrize("seed", range(20))
def test_a_form_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    data = bytes(rng.choice(b"\r\n-ab") for _ in range(rng.randrange(5000)))
    kind, body = form_of(data, purpose="batch", more="1")
    form, found, at = MultipartForm(kind), b"", 0
    while at < len(body):
        size = rng.randrange(1, 700)
        found, at = found + form.feed(body[at : at + size]), at + size
    form.end()
    assert found == data
    assert (form.fields, form.filename) == ({"purpose": "batch", "more": "1"}, "in.jsonl")


def test_what_is_no_such_form() -> None:
    kind, body = form_of(b"x" * 100)
    for wrong in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"):
        with pytest.raises(RequestError, match="multipart/form-data"):
            MultipartForm(wrong)
    form = MultipartForm(kind)
    form.feed(body[:-10])
    with pytest.raises(RequestError, match="does not end"):
        form.end()
    with pytest.raises(RequestError, match="cannot be read"):
        MultipartForm(kind).feed(b"no boundary at all" * 10)
    kind, body = form_of(b"", purpose="x" * 2000)
    with pytest.raises(RequestError, match="purpose: more than"):
        MultipartForm(kind).feed(body)
    kind, body = form_of(b"", **{str(at): "x" for at in range(MAX_PARTS)})
    with pytest.raises(RequestError, match=f"more than {MAX_PARTS} parts"):
        MultipartForm(kind).feed(body)
    request = httpx.Request("POST", "http://x/", files=[("file", ("a", b"1")), ("file", ("b", b"2"))])
    with pytest.raises(RequestError, match="given twice"):
        MultipartForm(request.headers["content-type"]).feed(request.read())
    request = httpx.Request("POST", "http://x/", files={"other": ("a", b"1")})
    form = MultipartForm(request.headers["content-type"])
    form.feed(request.read())
    with pytest.raises(RequestError, match="file: missing"):
        form.end()


def test_names_are_text_alone() -> None:
    assert shown_name(b"../../etc/passwd") == "passwd"
    assert shown_name(b"C:\\temp\\a\r\nb.jsonl") == "ab.jsonl"
    assert shown_name(b"\xff" * 400 + b".jsonl")[-6:] == ".jsonl"
    assert shown_name(b"") == shown_name(b"/") == DEFAULT_NAME
