"""The text of a PDF, and what no file can do to a server that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import perdure
from perdure import InvalidInputError, TooLargeError
from perdure.ext.documents import child, pdf, routes
from perdure.ext.documents.pdf import pdf_text
from perdure.testing.toy import ToyModel
from server.live_server import live_server

from . import files

BODY = {"content-type": "application/octet-stream"}


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "file.pdf"
    path.write_bytes(data)
    return path


def test_the_text_of_a_pdf_comes_page_by_page(tmp_path: Path) -> None:
    found = pdf_text(written(tmp_path, files.pdf("Ferns like shade", "", "Herbs do not")))
    assert (found.pages, found.text) == (3, "Page 1\nFerns like shade\n\nPage 3\nHerbs do not")


def test_one_page_has_no_heading(tmp_path: Path) -> None:
    assert pdf_text(written(tmp_path, files.pdf("Ferns like shade"))).text == "Ferns like shade"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no PDF"),
        (b"PK\x03\x04", "no PDF"),
        (b"%PDF-1.4\n", "cannot be read"),
        (files.pdf("Ferns")[:200], "cannot be read"),
        (files.pdf(""), "pictures"),
    ],
)
def test_a_file_without_text_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        pdf_text(written(tmp_path, data))


def test_a_file_of_too_many_bytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "MOST_BYTES", 100)
    with pytest.raises(TooLargeError):
        pdf_text(written(tmp_path, files.pdf("Ferns")))


def test_a_text_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MOST_CHARACTERS", 10)
    assert child.read(written(tmp_path, files.pdf("Ferns like shade")))["limit"] == 10
    monkeypatch.setattr(child, "MOST_PAGES", 1)
    assert child.read(written(tmp_path, files.pdf("One", "Two")))["limit"] == 1


def test_a_reader_that_takes_too_long_or_too_much_is_ended(tmp_path: Path) -> None:
    path = written(tmp_path, files.pdf("Ferns"))
    with pytest.raises(InvalidInputError, match="more than"):
        pdf_text(path, seconds=0.001)
    with pytest.raises(InvalidInputError, match="memory"):
        pdf_text(path, memory=16 << 20)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with (
        perdure.open(ToyModel(), n_ctx=2048, store=tmp_path / "store") as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        yield client


def test_over_http_it_comes_with_its_tokens_and_leaves_nothing(client: httpx.Client, tmp_path: Path) -> None:
    answer = client.post("/v1/documents/text", content=files.pdf("Ferns like shade"), headers=BODY)
    assert answer.json() == {"text": "Ferns like shade", "pages": 1, "tokens": len("Ferns like shade")}
    refused = client.post("/v1/documents/text", content=b"no", headers=BODY)
    assert (refused.status_code, "no PDF" in refused.json()["error"]["message"]) == (400, True)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.name == "document"]


def test_over_http_more_bytes_than_are_read_do_not_come_in(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MOST_BYTES", 100)
    assert client.post("/v1/documents/text", content=files.pdf("Ferns"), headers=BODY).status_code == 413
