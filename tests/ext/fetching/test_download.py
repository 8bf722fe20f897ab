"""Downloads that are cut, changed or wrong."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from perdure.errors import FetchError
from perdure.ext.fetching.download import Remote, download, web
from serving import Page, Site, site

BODY = random.Random(1).randbytes(3_000_000)
SHA = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with site() as up:
        up.pages["/f"] = Page(body=BODY, headers={"ETag": '"one"'})
        yield up


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with web() as made:
        yield made


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "f.part"


def test_all_bytes_arrive_and_are_reported(here: Site, client: httpx.Client, part: Path) -> None:
    reports: list[tuple[int, int | None]] = []
    download(client, Remote(url=f"{here.url}/f", sha256=SHA), part, lambda *it: reports.append(it))
    assert part.read_bytes() == BODY
    assert reports[0] == (0, len(BODY))
    assert reports[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_a_lost_connection_is_continued_where_it_broke(here: Site, client: httpx.Client, part: Path) -> None:
    here.pages["/f"].drops = [1_000_000, 500_000]
    download(client, Remote(url=f"{here.url}/f", sha256=SHA), part)
    assert part.read_bytes() == BODY
    assert [it.range for it in here.gets("/f")] == [None, "bytes=1000000-", "bytes=1500000-"]


def test_a_part_of_an_earlier_try_is_continued(here: Site, client: httpx.Client, part: Path) -> None:
    remote = Remote(url=f"{here.url}/f", sha256=SHA)

    def stop(done: int, total: int | None) -> None:
        if done > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(client, remote, part, stop)
    kept = part.stat().st_size
    assert 1_000_000 < kept < len(BODY)
    download(client, remote, part)
    assert part.read_bytes() == BODY
    assert here.gets("/f")[1].range == f"bytes={kept}-"


def test_a_part_that_is_complete_is_not_fetched_again(here: Site, client: httpx.Client, part: Path) -> None:
    remote = Remote(url=f"{here.url}/f", sha256=SHA)
    download(client, remote, part)
    download(client, remote, part)
    assert part.read_bytes() == BODY
    assert [it.range for it in here.gets("/f")] == [None, f"bytes={len(BODY)}-"]


def test_a_file_that_changed_meanwhile_is_started_again(here: Site, client: httpx.Client, part: Path) -> None:
    here.pages["/f"].drops = [1_000_000, 0, 0, 0, 0]
    with pytest.raises(FetchError, match="1000000 bytes here"):
        download(client, Remote(url=f"{here.url}/f"), part)
    other = BODY[::-1]
    here.pages["/f"] = Page(body=other, headers={"ETag": '"two"'})
    download(client, Remote(url=f"{here.url}/f"), part)
    assert part.read_bytes() == other


def test_a_part_of_another_file_is_not_continued(here: Site, client: httpx.Client, part: Path) -> None:
    here.pages["/f"].drops = [1_000_000, 0, 0, 0, 0]
    with pytest.raises(FetchError):
        download(client, Remote(url=f"{here.url}/f", sha256=SHA), part)
    other = BODY[::-1]
    here.pages["/f"] = Page(body=other)
    download(client, Remote(url=f"{here.url}/f", sha256=hashlib.sha256(other).hexdigest()), part)
    assert part.read_bytes() == other
    assert here.gets("/f")[-1].range is None


def test_damaged_bytes_of_an_earlier_try_are_fetched_afresh(
    here: Site, client: httpx.Client, part: Path
) -> None:
    remote = Remote(url=f"{here.url}/f", sha256=SHA)
    here.pages["/f"].drops = [1_000_000, 0, 0, 0, 0]
    with pytest.raises(FetchError):
        download(client, remote, part)
    part.write_bytes(bytes(1_000_000))
    download(client, remote, part)
    assert part.read_bytes() == BODY


def test_a_server_without_ranges_is_served_from_the_start(
    here: Site, client: httpx.Client, part: Path
) -> None:
    here.pages["/f"].ranges = False
    here.pages["/f"].drops = [1_000_000]
    download(client, Remote(url=f"{here.url}/f", sha256=SHA), part)
    assert part.read_bytes() == BODY


def test_wrong_bytes_are_refused_and_not_kept(here: Site, client: httpx.Client, part: Path) -> None:
    here.pages["/f"].body = b"\0" + BODY[1:]
    with pytest.raises(FetchError, match=f"SHA-256 [0-9a-f]{{64}}, expected {SHA}"):
        download(client, Remote(url=f"{here.url}/f", sha256=SHA), part)
    assert not list(part.parent.iterdir())


def test_a_wrong_size_is_refused(here: Site, client: httpx.Client, part: Path) -> None:
    with pytest.raises(FetchError, match=r"\d+ bytes, expected 4"):
        download(client, Remote(url=f"{here.url}/f", size=4), part)


def test_a_status_that_will_not_change_is_an_error_at_once(
    here: Site, client: httpx.Client, part: Path
) -> None:
    with pytest.raises(FetchError, match="404 Not Found"):
        download(client, Remote(url=f"{here.url}/none"), part)
    assert len(here.requests) == 1


def test_a_server_in_trouble_is_asked_a_few_times(here: Site, client: httpx.Client, part: Path) -> None:
    here.pages["/f"].status = 503
    with pytest.raises(FetchError, match="503 Service Unavailable 4 times"):
        download(client, Remote(url=f"{here.url}/f"), part)
    assert len(here.requests) == 4


def test_a_server_that_is_not_there_is_named_without_secrets(client: httpx.Client, part: Path) -> None:
    with site() as gone:
        url = gone.url.replace("http://", "http://user:secret@")
    with pytest.raises(FetchError, match="could not be reached or read") as caught:
        download(client, Remote(url=f"{url}/f?token=hidden"), part)
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_file_that_cannot_be_written_is_a_typed_error(here: Site, client: httpx.Client, part: Path) -> None:
    part.mkdir()
    with pytest.raises(FetchError, match="could not be written"):
        download(client, Remote(url=f"{here.url}/f"), part)


@pytest.mark.parametrize(
    ("headers", "have"), [({}, 0), ({}, 3), ({"Content-Range": "bytes 7-9/10"}, 0)], ids=str
)
def test_a_part_that_was_not_asked_for_counts_as_a_failure_y12(
    here: Site, client: httpx.Client, part: Path, headers: dict[str, str], have: int
) -> None:
    """Y12: a server that answers 206 without a range that fits is given up after a few tries."""
    here.pages["/f"] = Page(body=b"0123456789", status=206, headers=headers)
    part.write_bytes(bytes(have))

    def stop(request: httpx.Request) -> None:
        assert len(here.requests) < 20, "it asks for ever"

    client.event_hooks["request"].append(stop)
    with pytest.raises(FetchError, match=r"a part came, and not the one from byte 0 on.* 4 times"):
        download(client, Remote(url=f"{here.url}/f"), part)
    assert len(here.requests) == 4


def test_no_more_is_written_than_was_announced_y12(here: Site, client: httpx.Client, part: Path) -> None:
    """Y12: a body that goes on behind the announced size is not read to its end."""
    here.pages["/f"].hold = threading.Event()
    with pytest.raises(FetchError, match="expected 4"):
        download(client, Remote(url=f"{here.url}/f", size=4), part)
    assert not here.pages["/f"].hold.is_set()
