"""Models from a hub, against a server that speaks what the hub's own client needs."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_bytes as g
from perdure.errors import FetchError, ModelError, ModelNotFoundError
from perdure.ext.fetching.hub import candidates, fetch_hub, hub_place
from perdure.models import HubSource, entries, remove, resolve
from serving import Page, Site, put_repo, refusal, site

MODEL = g.tiny(data=random.Random(3).randbytes(1_000_000))
OTHER = g.tiny([g.text("general.license", "mit")])
ONE = "/me/one/resolve/main/one-Q8_0.gguf"


@pytest.fixture(autouse=True)
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The hub's own cache, which is somebody else's on this machine."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "hf"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with site() as up:
        put_repo(up, "me/one", {"README.md": b"hello", "one-Q8_0.gguf": MODEL})
        put_repo(
            up,
            "me/many",
            {
                "many-Q4_K_M.gguf": MODEL,
                "many-Q4_K_S.gguf": OTHER,
                "mmproj-many-f16.gguf": OTHER,
                "big/many-Q8_0-00001-of-00002.gguf": MODEL,
                "big/many-Q8_0-00002-of-00002.gguf": OTHER,
            },
        )
        put_repo(up, "me/none", {"model.safetensors": b"x"})
        yield up


def fetch(here: Site, name: str, models: Path) -> Path:
    source = resolve(name)
    assert isinstance(source, HubSource)
    return fetch_hub(source, models, endpoint=here.url)


@pytest.mark.parametrize("name", ["me/one", "hf:me/one/one-Q8_0.gguf", "me/one:one-Q8_0.gguf", "me/one:q8_0"])
def test_every_way_to_name_a_file_gets_it(name: str, here: Site, tmp_path: Path) -> None:
    path = fetch(here, name, tmp_path)
    assert path == tmp_path / "hub" / "me" / "one" / "one-Q8_0.gguf"
    assert path.read_bytes() == MODEL
    source = resolve(name)
    assert isinstance(source, HubSource)
    assert hub_place(source, tmp_path) == path


def test_a_tag_chooses_among_many(here: Site, tmp_path: Path) -> None:
    assert fetch(here, "me/many:Q4_K_S", tmp_path).read_bytes() == OTHER


def test_without_a_tag_the_usual_quantisation_is_taken_where_there_is_one(here: Site, tmp_path: Path) -> None:
    put_repo(here, "me/usual", {"it-Q8_0.gguf": MODEL, "it-Q4_K_M.gguf": OTHER})
    assert fetch(here, "me/usual", tmp_path).name == "it-Q4_K_M.gguf"


def test_a_split_model_comes_with_all_its_parts(here: Site, tmp_path: Path) -> None:
    path = fetch(here, "me/many:Q8_0", tmp_path)
    assert path.name == "many-Q8_0-00001-of-00002.gguf"
    assert path.with_name("many-Q8_0-00002-of-00002.gguf").read_bytes() == OTHER


def test_a_revision_is_kept_apart(here: Site, tmp_path: Path) -> None:
    put_repo(here, "me/one", {"one-Q8_0.gguf": OTHER}, revision="v2")
    assert fetch(here, "me/one@v2", tmp_path).read_bytes() == OTHER
    assert fetch(here, "me/one", tmp_path).read_bytes() == MODEL


def test_a_file_that_is_current_is_not_fetched_again(here: Site, tmp_path: Path) -> None:
    fetch(here, "me/one", tmp_path)
    fetch(here, "me/one", tmp_path)
    assert len(here.gets(ONE)) == 1


def test_a_file_that_changed_on_the_hub_is_fetched_anew(here: Site, tmp_path: Path) -> None:
    fetch(here, "me/one", tmp_path)
    put_repo(here, "me/one", {"one-Q8_0.gguf": OTHER})
    assert fetch(here, "me/one", tmp_path).read_bytes() == OTHER


def test_a_lost_connection_is_continued(here: Site, tmp_path: Path) -> None:
    here.pages[ONE].drops = [400_000]
    assert fetch(here, "me/one", tmp_path).read_bytes() == MODEL
    assert [it.range for it in here.gets(ONE)] == [None, "bytes=400000-"]


def test_a_failed_fetch_leaves_its_part_for_the_next_one(here: Site, tmp_path: Path) -> None:
    here.pages[ONE].drops = [400_000, 0, 0, 0, 0]
    with pytest.raises(FetchError, match="400000 bytes here"):
        fetch(here, "me/one", tmp_path)
    assert fetch(here, "me/one", tmp_path).read_bytes() == MODEL
    assert here.gets(ONE)[-1].range == "bytes=400000-"


def test_bytes_that_do_not_fit_their_digest_are_refused(here: Site, tmp_path: Path) -> None:
    here.pages[ONE].body = MODEL[:-1] + b"!"
    with pytest.raises(FetchError, match="SHA-256"):
        fetch(here, "me/one", tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("me/nobody", ModelNotFoundError, "no model me/nobody"),
        ("me/one:none.gguf", ModelNotFoundError, "no file 'none.gguf'"),
        ("me/one@v9", ModelNotFoundError, "no revision 'v9'"),
        ("me/gated:a.gguf", FetchError, "terms"),
        ("me/broken:a.gguf", FetchError, "did not give"),
        ("me/none", ModelNotFoundError, "holds no GGUF"),
        ("me/others", ModelNotFoundError, "holds 2 GGUF models; name one"),
        ("me/many:Q2_K", ModelNotFoundError, "no GGUF model that fit 'Q2_K'"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(
    name: str, error: type[ModelError], reason: str, here: Site, tmp_path: Path
) -> None:
    put_repo(here, "me/others", {"it-Q8_0.gguf": MODEL, "it-Q2_K.gguf": OTHER})
    here.pages["/api/models/me/nobody"] = refusal(404, "RepoNotFound")
    here.pages["/api/models/me/one/revision/v9"] = refusal(404, "RevisionNotFound")
    here.pages["/me/one/resolve/main/none.gguf"] = refusal(404, "EntryNotFound")
    here.pages["/me/gated/resolve/main/a.gguf"] = refusal(403, "GatedRepo")
    here.pages["/me/broken/resolve/main/a.gguf"] = Page(status=500)
    with pytest.raises(error, match=reason):
        fetch(here, name, tmp_path)


@pytest.mark.parametrize("name", ["me/one", "me/one:one-Q8_0.gguf"])
def test_a_hub_out_of_reach_is_said_plainly(name: str, tmp_path: Path) -> None:
    with site() as gone:
        pass
    with pytest.raises(FetchError, match="could not be reached"):
        fetch(gone, name, tmp_path)


@pytest.mark.parametrize(
    ("environment", "code", "said"),
    [({}, 0, "one-Q8_0.gguf"), ({"HF_HUB_OFFLINE": "1"}, 1, "HF_HUB_OFFLINE forbids")],
)
def test_the_hub_librarys_own_settings_count(
    environment: dict[str, str], code: int, said: str, here: Site, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perdure.cli", "models", "pull", "me/one"],
        env={**os.environ, "HF_ENDPOINT": here.url, "PERDURE_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_lead_out_of_the_folder_are_no_models() -> None:
    assert candidates(["../../evil.gguf", "/etc/evil.gguf", "a/../b.gguf", "c\\d.gguf", "e.gguf"], None) == [
        "e.gguf"
    ]


def test_tags_match_whole_words() -> None:
    files = ["a-Q4_K_M.gguf", "a-IQ4_K_M.gguf", "a.Q4_K.gguf", "b/Q4_K_M/c.gguf", "note.txt"]
    assert candidates(files, "q4_k_m") == ["a-Q4_K_M.gguf", "b/Q4_K_M/c.gguf"]
    assert candidates(files, "Q4_K") == ["a.Q4_K.gguf"]


def test_what_was_fetched_is_listed_once_and_removed_whole(
    here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    fetch(here, "me/many:Q8_0", tmp_path / "models")
    fetch(here, "me/many:Q4_K_S", tmp_path / "models")
    names = ["hf:me/many/big/many-Q8_0-00001-of-00002.gguf", "hf:me/many/many-Q4_K_S.gguf"]
    found = [entry for entry in entries() if entry.source == "hub"]
    assert [(entry.name, entry.present) for entry in found] == [(name, True) for name in names]
    assert found[0].size == len(MODEL) + len(OTHER)
    assert len(remove(names[0])) == 2
    assert [entry.name for entry in entries() if entry.source == "hub"] == names[1:]
    remove(names[1])
    assert not (tmp_path / "models" / "hub").exists()


def test_a_projector_comes_with_its_model_and_goes_with_the_last_one(
    here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    put_repo(
        here,
        "me/seeing",
        {
            "seeing-Q4_K_M.gguf": MODEL,
            "seeing-Q8_0.gguf": OTHER,
            "mmproj-seeing-bf16.gguf": g.tiny([g.text("general.license", "bf16")]),
            "mmproj-seeing-f16.gguf": g.tiny([g.text("general.license", "f16")]),
        },
    )
    path = fetch(here, "me/seeing:Q8_0", tmp_path / "models")
    assert path.name == "seeing-Q8_0.gguf"
    assert {each.name for each in path.parent.glob("*.gguf")} == {path.name, "mmproj-seeing-f16.gguf"}
    fetch(here, "me/seeing:seeing-Q4_K_M.gguf", tmp_path / "models")
    shown = [entry.name for entry in entries() if entry.source == "hub"]
    assert shown == ["hf:me/seeing/seeing-Q4_K_M.gguf", "hf:me/seeing/seeing-Q8_0.gguf"]
    assert [each.name for each in remove(shown[0])] == ["seeing-Q4_K_M.gguf"]
    assert {each.name for each in remove(shown[1])} == {path.name, "mmproj-seeing-f16.gguf"}


def test_what_the_hubs_own_library_fetched_is_not_fetched_again(
    here: Site, tmp_path: Path, hub_cache: Path
) -> None:
    """One copy of its bytes serves both; to remove ours leaves theirs."""
    blobs = hub_cache / "models--me--one" / "blobs"
    blobs.mkdir(parents=True)
    blob = blobs / hashlib.sha256(MODEL).hexdigest()
    blob.write_bytes(MODEL)
    asked = len(here.requests)
    path = fetch(here, "me/one", tmp_path)
    assert path.samefile(blob)
    assert not any(request.method == "GET" and "resolve" in request.path for request in here.requests[asked:])
    path.unlink()
    assert blob.read_bytes() == MODEL


def test_a_damaged_file_of_the_hubs_cache_is_not_taken(here: Site, tmp_path: Path, hub_cache: Path) -> None:
    blobs = hub_cache / "models--me--one" / "blobs"
    blobs.mkdir(parents=True)
    blob = blobs / hashlib.sha256(MODEL).hexdigest()
    blob.write_bytes(MODEL[:-1] + b"?")
    path = fetch(here, "me/one", tmp_path)
    assert path.read_bytes() == MODEL
    assert not path.samefile(blob)
