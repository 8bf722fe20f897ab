"""Models that the operator has a server fetch: one at a time, told how far it is, cancelled, and by nobody
else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

import gguf_bytes as g
from decode.observed import toy
from perdure.engine_config import EngineConfig
from perdure.errors import InvalidInputError, ModelNotFoundError
from perdure.ext.fetching import catalogue
from perdure.ext.fetching.puller import Puller
from perdure.ext.fetching.routes import puller_of
from perdure.server.core.keys import Keys, new_key
from perdure.server.core.settings import AllowedHosts
from perdure.server.pool import ModelPool
from server.live_server import PATIENCE, LiveServer, hello, live_server, opened
from serving import Site, put_repo, site

PULL = "/v1/models/pull"
CHAT = "/v1/chat/completions"
MODEL = g.tiny(data=bytes(range(256)) * 4096)
FILE = "/me/one/resolve/main/one-Q8_0.gguf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    """A hub on this machine, and a home to fetch to."""
    from huggingface_hub import constants

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    with site() as up:
        monkeypatch.setattr(constants, "ENDPOINT", up.url)
        template = up.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        put_repo(up, "me/one", {"one-Q8_0.gguf": MODEL})
        put_repo(up, "me/two", {"two-Q8_0.gguf": MODEL})
        yield up


@pytest.fixture
def server(hub: Site) -> Iterator[tuple[LiveServer, httpx.Client, httpx.Client]]:
    """A server with the operator's client, and another's."""
    (secret, key), (other, second) = new_key("metrics"), new_key("ann")
    with (
        opened(toy()) as rt,
        live_server(rt, keys=Keys([key, second])) as server,
        server.client(secret) as operator,
        server.client(other) as ann,
    ):
        yield server, operator, ann


def ended(server: LiveServer) -> Any:
    """The latest pull, once it is over."""
    puller = puller_of(server.state)
    while (pull := puller.latest) is not None and pull.state == "running":
        assert puller.wait(pull, PATIENCE) != pull, "nothing came"
    return pull


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.iter_lines()]


def test_the_operator_has_a_model_fetched(
    server: tuple[LiveServer, httpx.Client, httpx.Client], tmp_path: Path
) -> None:
    live, operator, _ = server
    assert operator.get(PULL).status_code == 404
    started = operator.post(PULL, json={"model": "me/one"})
    assert (started.status_code, started.json()["model"]) == (202, "me/one")
    assert ended(live).state == "done"
    told = operator.get(PULL).json()
    assert (told["state"], told["completed"], told["total"]) == ("done", len(MODEL), len(MODEL))
    assert told["ended"] >= told["started"]
    assert (tmp_path / "home/models/hub/me/one/one-Q8_0.gguf").read_bytes() == MODEL


def test_nobody_else_makes_the_server_fetch_something(
    server: tuple[LiveServer, httpx.Client, httpx.Client], hub: Site
) -> None:
    live, _, ann = server
    for answer in (ann.post(PULL, json={"model": "me/one"}), ann.get(PULL), ann.delete(PULL)):
        assert answer.status_code == 403
    assert ann.post("/api/pull", json={"model": "me/one"}).status_code == 404
    with opened(toy()) as rt, live_server(rt) as open_server, open_server.client() as client:
        refused = client.post(PULL, json={"model": "me/one"})
        assert refused.status_code == 403
        assert "perdure keys add metrics" in refused.json()["error"]["message"]
        assert client.post("/api/pull", json={"model": "me/one"}).status_code == 404
        assert puller_of(open_server.state).latest is None
    assert puller_of(live.state).latest is None
    assert hub.requests == []


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "./one.gguf", "http://127.0.0.1:1/x.gguf", "lmstudio:a/b/c.gguf", "none-such", ""]
)
def test_only_names_of_the_hub_are_fetched(
    name: str, server: tuple[LiveServer, httpx.Client, httpx.Client], hub: Site
) -> None:
    """No path, which would tell what files there are, and no other address."""
    live, operator, _ = server
    assert operator.post(PULL, json={"model": name}).status_code in (400, 404)
    assert puller_of(live.state).latest is None
    assert hub.requests == []


def test_one_at_a_time_and_a_cancelled_one_goes_on_where_it_stopped(
    server: tuple[LiveServer, httpx.Client, httpx.Client], hub: Site
) -> None:
    live, operator, _ = server
    hub.pages[FILE].hold = hold = threading.Event()
    try:
        assert operator.post(PULL, json={"model": "me/one"}).status_code == 202
        pull, puller = puller_of(live.state).latest, puller_of(live.state)
        while pull is not None and pull.state == "running" and not pull.completed:
            pull = puller.wait(pull, PATIENCE)
        assert operator.post(PULL, json={"model": "me/two"}).status_code == 409
        assert operator.post(PULL, json={"model": "me/one"}).status_code == 202, "it is being fetched"
        assert operator.get(PULL).json()["state"] == "running"
        assert operator.delete(PULL).status_code == 200
    finally:
        hold.set()
    assert ended(live).state == "cancelled"
    hub.pages[FILE].hold = None
    answer = operator.post("/api/pull", json={"model": "me/one"})
    found = lines(answer)
    assert found[0] == {"status": "pulling manifest"}
    assert found[-1] == {"status": "success"}
    ranges = [each.range for each in hub.gets(FILE)]
    assert ranges[0] is None or ranges[0].startswith("bytes=0")
    assert ranges[-1] is not None
    assert not ranges[-1].startswith("bytes=0"), "what had come was kept"


def test_what_goes_wrong_is_told(server: tuple[LiveServer, httpx.Client, httpx.Client]) -> None:
    live, operator, _ = server
    assert operator.post(PULL, json={"model": "me/none"}).status_code == 202
    assert ended(live).state == "failed"
    assert "me/none" in operator.get(PULL).json()["error"]
    refused = operator.post("/api/pull", json={"model": "me/none", "stream": False})
    assert refused.status_code == 502
    assert "me/none" in refused.text
    last = lines(operator.post("/api/pull", json={"model": "me/none"}))[-1]
    assert "me/none" in last["error"]
    done = operator.post("/api/pull", json={"model": "me/one", "stream": False})
    assert done.json() == {"status": "success"}


def test_a_pull_that_breaks_leaves_the_next_one_free() -> None:
    """Whatever is raised: the puller is not taken for busy for ever."""

    calls = iter([SystemExit("no idea")])

    def broken(name: str, progress: Any) -> str:
        for error in calls:
            raise error
        return name

    puller = Puller(broken)
    for state, said in (("failed", "SystemExit"), ("done", "")):
        pull = puller.start("me/one")
        while pull is not None and pull.state == "running":
            pull = puller.wait(pull, PATIENCE)
        assert pull is not None
        assert pull.state == state
        assert said in pull.error
    with pytest.raises((InvalidInputError, ModelNotFoundError)):
        puller.start("none-such")


def test_the_catalogue_says_what_can_be_fetched_by_name(
    server: tuple[LiveServer, httpx.Client, httpx.Client],
) -> None:
    _, operator, ann = server
    for client in (operator, ann):
        models = client.get("/v1/catalogue").raise_for_status().json()["data"]
        assert [model["recommended"] for model in models].count(True) == 1
        assert all(model["name"] and model["fit"] and model["nbytes"] > 0 for model in models)


def test_what_was_pulled_is_asked_for_at_once(
    hub: Site, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """By the name under which it was pulled and by that of its file, beside the model that was there."""
    (secret, key), (other, second) = new_key("metrics"), new_key("ann")
    put_repo(hub, "me/real", {"real-Q8_0.gguf": zoo_path("gemma3").read_bytes()})
    source = "ext.workers.engines:full"
    with (
        opened(source, store=tmp_path / "store") as rt,
        closing(ModelPool.of_runtime("toy", rt, source=source, config=EngineConfig(n_ctx=512))) as pool,
        live_server(rt, keys=Keys([key, second]), pool=pool) as live,
        live.client(secret) as operator,
        live.client(other) as ann,
    ):
        assert ann.post(CHAT, json=hello(model="me/real")).status_code == 404
        pulled = lines(operator.post("/api/pull", json={"model": "me/real"}))
        assert pulled[-1] == {"status": "success"}
        assert operator.get(PULL).json()["serves"] == "real-Q8_0"
        assert [each["id"] for each in ann.get("/v1/models").json()["data"]] == ["toy", "real-Q8_0"]
        for name in ("me/real", "real-Q8_0", "toy", "real-Q8_0"):
            answer = ann.post(CHAT, json=hello(model=name))
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == ("toy" if name == "toy" else "real-Q8_0")
        # Pulled again, it is the one that is there.
        assert lines(operator.post("/api/pull", json={"model": "me/real"}))[-1] == {"status": "success"}
        assert len(ann.get("/v1/models").json()["data"]) == 2


@pytest.fixture
def keyless(hub: Site) -> Iterator[LiveServer]:
    """A server without keys, and a hub that has a model of the catalogue."""
    model = catalogue.find("smollm2:360m")
    assert model is not None
    put_repo(hub, model.repo, {model.file: MODEL})
    with opened(toy()) as rt, live_server(rt) as server:
        yield server


OWN_PAGE = {"sec-fetch-site": "same-origin"}


def test_without_keys_its_own_page_fetches_what_the_catalogue_has(keyless: LiveServer) -> None:
    with keyless.client() as client:
        assert client.get("/v1/catalogue", headers=OWN_PAGE).json()["may_pull"] is True
        assert client.get("/v1/catalogue").json()["may_pull"] is False
        page = {**OWN_PAGE, "origin": keyless.url}
        assert client.post(PULL, json={"model": "me/one"}, headers=page).status_code == 403
        assert puller_of(keyless.state).latest is None
        assert client.post(PULL, json={"model": "smollm2:360m"}, headers=page).status_code == 202
        assert ended(keyless).state == "done"
        known = client.get("/v1/catalogue", headers=OWN_PAGE).json()["pull"]
        assert (known["model"], known["state"]) == ("smollm2:360m", "done")
        assert client.get(PULL).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {**OWN_PAGE, "origin": "http://evil.example"},
        {**OWN_PAGE, "host": "evil.example"},
        {**OWN_PAGE, "x-forwarded-for": "10.0.0.9"},
        {**OWN_PAGE, "forwarded": "for=10.0.0.9"},
        {**OWN_PAGE, "via": "1.1 proxy"},
        {**OWN_PAGE, "host": "chat.example.org"},
    ],
)
def test_without_keys_nobody_else_has_a_model_fetched(keyless: LiveServer, headers: dict[str, str]) -> None:
    keyless.state.hosts = AllowedHosts(further=["chat.example.org"])
    with keyless.client() as client:
        for answer in (
            client.post(PULL, json={"model": "smollm2:360m"}, headers=headers),
            client.delete(PULL, headers=headers),
        ):
            assert answer.status_code == 403, answer.text
        keyless.state.page = False
        assert client.post(PULL, json={"model": "smollm2:360m"}, headers=OWN_PAGE).status_code == 403
    assert puller_of(keyless.state).latest is None
