"""The published `ollama` client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from perdure.server.core.keys import Keys
from server.live_server import LiveServer

MODEL = "toy"
"""Any name is served, and the answer says by whom."""
USER: Any = [{"role": "user", "content": "Hello"}]
SHORT: Any = {"num_predict": 8, "temperature": 0}
SCHEMA: Any = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}},
    "required": ["good"],
    "additionalProperties": False,
}


@pytest.fixture
def client(here: LiveServer, key: tuple[str, Keys]) -> Iterator[ollama.Client]:
    client = ollama.Client(host=here.url, headers={"authorization": f"Bearer {key[0]}"})
    yield client
    client._client.close()


def test_a_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat(MODEL, USER, options=SHORT)
    assert whole.model == "toy"
    assert whole.done_reason in ("stop", "length")
    assert whole.eval_count is not None
    assert whole.eval_count <= 8
    assert whole.prompt_eval_count
    assert whole.total_duration
    chunks = list(client.chat(MODEL, USER, options=SHORT, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_generate_by_the_template_and_raw(client: ollama.Client) -> None:
    by_template = client.generate(MODEL, "Hello", system="Be brief.", options=SHORT)
    raw = client.generate(MODEL, "Hello", raw=True, options=SHORT)
    assert raw.prompt_eval_count is not None
    assert by_template.prompt_eval_count is not None
    assert raw.prompt_eval_count < by_template.prompt_eval_count
    chunks = list(client.generate(MODEL, "Hello", raw=True, options=SHORT, stream=True))
    assert "".join(chunk.response or "" for chunk in chunks) == raw.response
    assert client.generate(MODEL, "").done_reason == "load"
    assert client.generate(MODEL, "", keep_alive=0).done_reason == "unload"


def test_a_format_and_thinking_are_taken(client: ollama.Client) -> None:
    reply = client.chat(
        MODEL, USER, format=SCHEMA, think=False, options={"num_predict": 64, "temperature": 0}
    )
    assert '"good"' in (reply.message.content or "")


def test_num_ctx_is_clamped_and_told_and_options_are_mapped_or_refused(client: ollama.Client) -> None:
    options: Any = {**SHORT, "num_ctx": 131072, "num_gpu": 99, "top_k": 5, "repeat_last_n": 16, "seed": 3}
    reply: Any = client.chat(MODEL, USER, options=options, keep_alive="5m")
    notes = reply.model_dump()["perdure"]["notes"] if "perdure" in reply.model_dump() else []
    assert not notes or any("num_ctx is 512" in note for note in notes)
    with pytest.raises(ollama.ResponseError, match=r"options\.tfs_z"):
        client.chat(MODEL, USER, options={"tfs_z": 0.5})


def test_embeddings(client: ollama.Client) -> None:
    found = client.embed(MODEL, ["one", "two"])
    assert len(found.embeddings) == 2
    assert list(client.embeddings(MODEL, "one").embedding) == list(found.embeddings[0])


def test_models_are_listed_shown_and_named(client: ollama.Client) -> None:
    [listed] = client.list().models
    assert listed.model == "toy:latest"
    assert client.ps().models[0].expires_at is not None
    shown = client.show("toy")
    assert shown.modelinfo is not None
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == 512
    assert "completion" in (shown.capabilities or [])
    assert [told.status for told in client.pull("toy", stream=True)][-1] == "success"
    client.copy("toy", "mine")
    assert client.chat("mine", USER, options=SHORT).model == "toy"
    assert [each.model for each in client.list().models] == ["toy:latest", "mine:latest"]
    client.delete("mine")
    with pytest.raises(ollama.ResponseError, match="no client can delete"):
        client.delete("toy")


def test_a_name_of_no_model_here_is_not_found_and_no_other_model_answers_to_it(
    client: ollama.Client,
) -> None:
    for ask in (
        lambda: client.pull("llama3.2"),
        lambda: list(client.pull("llama3.2", stream=True)),
        lambda: client.chat("llama3.2", USER),
        lambda: client.generate("llama3.2", "Hello"),
        lambda: client.generate("llama3.2", ""),
        lambda: client.embed("llama3.2", "one"),
        lambda: client.embeddings("llama3.2", "one"),
        lambda: client.show("llama3.2"),
        lambda: client.copy("llama3.2", "mine"),
    ):
        with pytest.raises(ollama.ResponseError, match=r"llama3\.2' not found") as refused:
            ask()
        assert refused.value.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_is_an_error_and_never_cut(client: ollama.Client, stream: bool) -> None:
    long: Any = [{"role": "user", "content": "é " * 9000}]
    with pytest.raises(ollama.ResponseError, match="tokens") as refused:
        list(client.chat(MODEL, long, stream=True)) if stream else client.chat(MODEL, long)
    assert refused.value.status_code == 400
