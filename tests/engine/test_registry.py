"""Engines are found by what is given, in this process and in a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import perdure
from engine import made_up
from ext.workers.engines import QUICK
from perdure.cli.app import app
from perdure.engine import registry
from perdure.engine.factory import FACTORY
from perdure.engine.llama.engine import ENGINE as LLAMA
from perdure.errors import InvalidInputError
from perdure.extension import imported
from server.live_server import live_server


@pytest.fixture
def registered() -> Iterator[None]:
    registry.register(made_up.NAME)
    try:
        yield
    finally:
        registry.unregister(made_up.NAME)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "isolated",
    [
        pytest.param(False, id="in process"),
        pytest.param(QUICK, id="in a worker", marks=pytest.mark.extension("workers")),
    ],
)
def test_a_registered_engine_is_served_over_http(isolated: bool) -> None:
    with (
        perdure.open("made-up:bird", n_ctx=256, slots=1, isolated=isolated) as rt,
        live_server(rt) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        asked = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
        assert reply["usage"]["completion_tokens"] > 0
        assert client.get("/v1/machine").json()["models"][0]["architecture"] == "made-up"
        details = client.post("/api/show", json={"model": "toy"}).json()["details"]
        assert (details["family"], details["quantization_level"]) == ("made-up", "none")
        assert rt.model.info.nbytes == 7


@pytest.mark.usefixtures("registered")
def test_the_command_tells_of_a_registered_engine() -> None:
    shown = CliRunner().invoke(app, ["show", "made-up:bird"])
    assert "made-up" in shown.output
    assert shown.exit_code == 0
    findings = [each for name in registry.engines() for each in imported(name).findings()]
    assert "made-up is here" in [each.found for each in findings]
    assert registry.names_model("made-up:bird")


def test_a_source_goes_to_the_engine_that_claims_it(tmp_path: Path) -> None:
    assert registry.engine_for(None) is LLAMA
    assert registry.engine_for("owner/repo:Q4_K_M") is LLAMA
    assert registry.engine_for("ext.workers.engines:full") is FACTORY
    file = tmp_path / "without a suffix"
    file.write_bytes(b"GGUF")
    assert registry.engine_for(file) is LLAMA
    assert registry.engine_for("nothing that anybody knows") is LLAMA


def test_what_is_no_engine_is_not_registered() -> None:
    with pytest.raises(InvalidInputError, match="is no Engine"):
        registry.register("engine.made_up:NAME")
    with pytest.raises(InvalidInputError, match="no_such_module"):
        registry.register("no_such_module:ENGINE")
