"""Images over HTTP, by the vendors' own clients."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

import perdure
from perdure import Image
from perdure.ext.images.media_store import MediaStore
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, live_server

from .pictures import picture, sound

Toy = Callable[[str], tuple[Path, Path]]

FIRST, SECOND = picture(seed=1), picture(seed=2)


@pytest.fixture(scope="module")
def seeing(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    store = tmp_path_factory.mktemp("store")
    with (
        perdure.open(toy("llava")[0], store=store, n_ctx=4096, slots=2, threads=1, exact=True) as runtime,
        live_server(runtime) as server,
    ):
        yield server


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


def asked(data: bytes, text: str = "what?") -> Any:
    image = {"type": "image_url", "image_url": {"url": url_of(data), "detail": "auto"}}
    return {
        "role": "user",
        "content": [{"type": "text", "text": "see "}, image, {"type": "text", "text": text}],
    }


def expected(server: LiveServer, *content: str | Image) -> str:
    """What the library replies."""
    return server.runtime.chat([{"role": "user", "content": list(content)}], max_tokens=8, temperature=0).text


def kept(server: LiveServer) -> int:
    folder = server.runtime.backend.storage.folder
    assert folder is not None
    return MediaStore(folder).usage().media


def test_openai_sends_an_image_and_goes_on(seeing: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="-", max_retries=0) as client:

        def ask(*messages: Any) -> Any:
            return client.chat.completions.create(
                model="toy", messages=list(messages), max_tokens=8, temperature=0
            )

        first = ask(asked(FIRST))
        assert first.choices[0].message.content == expected(seeing, "see ", Image(FIRST), "what?")
        assert first.usage.prompt_tokens > 64
        assert first.usage.prompt_tokens_details.image_tokens == 64
        assert ask(asked(SECOND)).choices[0].message.content != first.choices[0].message.content
        before = kept(seeing)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        more = ask(asked(FIRST), answer, {"role": "user", "content": "and then?" + 40 * " w1"})
        last = ask(
            asked(FIRST),
            answer,
            {"role": "user", "content": "and then?" + 40 * " w1"},
            {"role": "assistant", "content": more.choices[0].message.content},
            {"role": "user", "content": "so?"},
        )
        # The image is not encoded again, and not computed again once a whole step lies behind it.
        assert kept(seeing) == before
        assert last.usage.prompt_tokens_details.cached_tokens >= 128
        stream = client.chat.completions.create(
            model="toy", messages=[asked(FIRST)], max_tokens=8, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == first.choices[0].message.content


def test_anthropic_sends_images_also_as_results_of_tools(seeing: LiveServer) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64_of(FIRST)}
    image: Any = {"type": "image", "source": source}
    with anthropic.Anthropic(base_url=seeing.url, api_key="-", max_retries=0) as client:

        def ask(*messages: Any) -> Any:
            return client.messages.create(
                model="toy", max_tokens=8, messages=list(messages), extra_body={"temperature": 0}
            )

        reply = ask({"role": "user", "content": [{"type": "text", "text": "see"}, image]})
        assert reply.content[0].text == expected(seeing, "see", Image(FIRST))
        call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
        shown = ask(
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        )
        assert shown.usage.input_tokens + (shown.usage.cache_read_input_tokens or 0) > 64
        counted = client.messages.count_tokens(model="toy", messages=[{"role": "user", "content": [image]}])
        assert counted.input_tokens > 64


def test_ollama_sends_images(seeing: LiveServer) -> None:
    client = ollama.Client(host=seeing.url)
    options = {"temperature": 0, "num_predict": 8}
    message = {"role": "user", "content": "what?", "images": [FIRST]}
    chatted = client.chat("toy", [message], options=options)
    assert chatted.message.content == expected(seeing, Image(FIRST), "what?")
    generated = client.generate("toy", "what?", images=[FIRST], options=options)
    assert generated.response == chatted.message.content
    vars(client)["_client"].close()


def test_what_cannot_be_read_is_refused_in_words(seeing: LiveServer) -> None:
    def refused(url: str) -> str:
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
        answer: httpx.Response = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    with seeing.client() as client:
        for url in ("https://example.org/a.png", "http://127.0.0.1/a", "file:///etc/passwd", "x", "data:,a"):
            assert "not fetched" in refused(url)
        assert "base64" in refused("data:image/png;base64,%%%")
        assert "no image" in refused(url_of(b"nothing"))
        assert "damaged" in refused(url_of(FIRST[: len(FIRST) // 2]))
        # The digest of a file that another one sent names nothing here.
        digest = Image(FIRST).digest
        body = {"messages": [{"role": "user", "content": "a", "images": [[0, digest]]}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] < 64
        part = {"type": "image", "digest": digest}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=body).status_code == 400
        raw = {"prompt": [1, *range(-8, 0), 5], "max_tokens": 4}
        assert client.post("/v1/completions", json=raw).status_code == 400


def test_responses_take_images_also_as_results_of_tools(seeing: LiveServer) -> None:
    image: Any = {"type": "input_image", "image_url": url_of(FIRST), "detail": "auto"}
    said: Any = {"role": "user", "content": [{"type": "input_text", "text": "see "}, image]}
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="-", max_retries=0) as client:

        def ask(*items: Any, **more: Any) -> Any:
            return client.responses.create(
                model="toy", input=list(items), max_output_tokens=8, temperature=0, **more
            )

        reply = ask(said)
        assert reply.output_text == expected(seeing, "see ", Image(FIRST))
        # What was sent is shown by its digest, and can be sent so.
        [shown] = client.responses.input_items.list(reply.id).data
        kept_url = f"sha256:{Image(FIRST).digest}"
        part: Any = shown
        assert part.content[1].image_url == kept_url
        again = ask({"role": "user", "content": [said["content"][0], {**image, "image_url": kept_url}]})
        assert again.output_text == reply.output_text
        more = ask({"role": "user", "content": "and then?"}, previous_response_id=reply.id)
        assert more.usage.input_tokens > 128
        call: Any = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
        result: Any = {"type": "function_call_output", "call_id": "call_1", "output": [image]}
        looked = ask({"role": "user", "content": "look"}, call, result, store=False)
        assert looked.usage.input_tokens > 64
        conversation = client.conversations.create(items=[said])
        [item] = client.conversations.items.list(conversation.id).data
        of_user: Any = item
        assert [each.type for each in of_user.content] == ["input_text", "input_image"]
    store = seeing.runtime.sessions.store
    for response in (reply, more, again):
        seeing.runtime.sessions.response(response.id).delete()
    assert store.file("", Image(FIRST).digest) is not None
    seeing.runtime.sessions.get(conversation.id).delete()
    assert store.file("", Image(FIRST).digest) is None


def test_an_image_costs_tokens_that_are_known_before_and_its_file_is_read_back(seeing: LiveServer) -> None:
    with seeing.client() as client:
        body = {"image_url": url_of(SECOND)}
        counted = client.post("/v1/images/count", json=body)
        assert counted.json() == {"tokens": 64}
        assert (
            client.post("/v1/images/count", json={"image_url": "data:image/png;base64,aaaa"}).status_code
            == 400
        )
        client.post("/v1/sessions", json={"name": "walk"}).raise_for_status()
        turn = {"messages": [asked(SECOND)], "max_tokens": 2}
        usage = client.post("/v1/sessions/walk/turns", json=turn).raise_for_status().json()["usage"]
        assert usage["prompt_tokens"] > 64
        [said] = client.get("/v1/sessions/walk/turns").json()["data"][0]["messages"]
        [(at, digest)] = said["images"]
        assert (at, digest) == (4, Image(SECOND).digest)
        read = client.get(f"/v1/sessions/walk/images/{digest}")
        assert read.content == SECOND
        assert read.headers["content-type"] == "image/png"
        assert read.headers["x-content-type-options"] == "nosniff"
        for path in ("walk/images/" + "0" * 64, f"other/images/{digest}"):
            assert client.get(f"/v1/sessions/{path}").status_code == 404
        client.delete("/v1/sessions/walk").raise_for_status()


def test_openai_asks_for_less_detail(toy: Toy, tmp_path: Path) -> None:
    """In chat completions, in Responses, in sessions, and before an image is sent."""
    url = url_of(picture(800, 64))
    with (
        perdure.open(toy("qwen2vl")[0], store=tmp_path, n_ctx=4096, slots=2, threads=1) as runtime,
        live_server(runtime) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
        server.client() as direct,
    ):

        def by_chat(**detail: Any) -> int:
            part = {"type": "image_url", "image_url": {"url": url, **detail}}
            said: Any = [{"role": "user", "content": [part]}]
            reply: Any = client.chat.completions.create(model="toy", messages=said, max_tokens=2)
            return int(reply.usage.prompt_tokens_details.image_tokens)

        def by_count(**detail: Any) -> int:
            answer = direct.post("/v1/images/count", json={"image_url": url, **detail}).raise_for_status()
            return int(answer.json()["tokens"])

        def respond(content: Any, **more: Any) -> Any:
            said: Any = [{"role": "user", "content": content}]
            return client.responses.create(model="toy", max_output_tokens=2, input=said, **more)

        whole, low = by_chat(), by_chat(detail="low")
        assert low < whole == by_chat(detail="auto") == by_chat(detail="high")
        assert whole - low == by_count(detail="high") - by_count(detail="low")

        image: Any = {"type": "input_image", "image_url": url, "detail": "low"}
        fewer, more = respond([image]), respond([{**image, "detail": "original"}])
        assert more.usage.input_tokens - fewer.usage.input_tokens == whole - low
        behind = respond("so?", previous_response_id=fewer.id)
        assert low < behind.usage.input_tokens < whole
        conversation = client.conversations.create(items=[{"role": "user", "content": [image]}])
        shown: Any = client.conversations.items.list(conversation.id).data[0]
        assert shown.content[0].detail == "low"
        direct.post("/v1/sessions", json={"name": "walk"}).raise_for_status()
        part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        turn = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        usage = direct.post("/v1/sessions/walk/turns", json=turn).raise_for_status().json()["usage"]
        assert usage["prompt_tokens_details"]["image_tokens"] == low
        [said] = direct.get("/v1/sessions/walk/turns").json()["data"][0]["messages"]
        assert [each[2:] for each in said["images"]] == [["low"]]
        for wrong in ("tiny", 1, ["low"]):
            with pytest.raises(openai.BadRequestError, match="low, high"):
                respond([{**image, "detail": wrong}])


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses", "ollama", "session"])
def test_a_key_sends_images_that_no_other_key_finds(toy: Toy, tmp_path: Path, protocol: str) -> None:
    """H5: not by a name, not by a digest; and they count in what it may store."""
    data = base64_of(FIRST)
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    said = [{"role": "user", "content": [{"type": "text", "text": "what?"}, url]}]
    told = [{"role": "user", "content": [{"type": "text", "text": "what?"}, shown]}]
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": said, "max_tokens": 2, "perdure": {"session": "s"}}),
        "messages": ("/v1/messages", {"messages": told, "max_tokens": 2, "perdure": {"session": "s"}}),
        "responses": (
            "/v1/responses",
            {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 2},
        ),
        "ollama": (
            "/api/chat",
            {
                "messages": [{"role": "user", "content": "?", "images": [data]}],
                "stream": False,
                "options": {"num_predict": 2},
                "perdure": {"session": "s"},
            },
        ),
        "session": ("/v1/sessions/s/turns", {"messages": said, "max_tokens": 2}),
    }[protocol]
    secret, ada = new_key("ada", stored_bytes=len(FIRST) + 30_000)
    other, bob = new_key("bob", stored_bytes=len(FIRST) // 2)
    digest = Image(FIRST).digest
    with (
        perdure.open(toy("llava")[0], store=tmp_path, n_ctx=4096, slots=2, threads=1) as runtime,
        live_server(runtime, keys=Keys([ada, bob])) as server,
        server.client(secret) as client,
        server.client(other) as stranger,
    ):
        if protocol == "session":
            for each in (client, stranger):
                each.post("/v1/sessions", json={"name": "s"}).raise_for_status()
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        store = runtime.sessions.store
        assert store.file("ada", digest) == FIRST
        assert store.file("bob", digest) is None
        [size] = [each for each in store.sizes() if each.namespace == "ada"]
        assert size.nbytes > len(FIRST)
        # By its digest it is nobody's but hers.
        by_digest = {"type": "image_url", "image_url": {"url": f"sha256:{digest}"}}
        ask = {"messages": [{"role": "user", "content": [by_digest]}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=ask).status_code == 200
        refused = stranger.post("/v1/chat/completions", json=ask)
        unknown = {"type": "image_url", "image_url": {"url": f"sha256:{'0' * 64}"}}
        nothing = stranger.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": [unknown]}], "max_tokens": 2},
        )
        assert refused.status_code == nothing.status_code >= 400
        assert refused.json()["error"]["message"].replace(digest[:12], "") == nothing.json()["error"][
            "message"
        ].replace("0" * 12, "")
        # The other one has it encoded anew, and may not store it: that counts against its limit.
        over = stranger.post(path, json=body)
        assert over.status_code == 507, over.text
        assert store.file("bob", digest) is None


def test_openai_sends_a_sound_and_goes_on(toy: Toy, tmp_path: Path) -> None:
    data = sound(1)

    def part(data: str, form: str = "wav") -> Any:
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}

    with (
        perdure.open(toy("qwen2a")[0], store=tmp_path, n_ctx=4096, slots=2, threads=1, exact=True) as runtime,
        live_server(runtime) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):

        def ask(*content: Any) -> Any:
            said: Any = [{"role": "user", "content": list(content)}]
            more = {"perdure": {"session": "walk"}}
            return client.chat.completions.create(
                model="toy", messages=said, max_tokens=8, temperature=0, extra_body=more
            )

        behind = {"type": "text", "text": "?" + 100 * " w1"}
        text = ask(part(base64_of(data)), behind).choices[0].message.content
        assert text == expected(server, perdure.Sound(data), behind["text"])
        assert ask(behind).usage.prompt_tokens_details.cached_tokens >= 750
        with server.client() as direct:
            [said] = direct.get("/v1/sessions/walk/turns").json()["data"][0]["messages"]
            read = direct.get(f"/v1/sessions/walk/images/{said['images'][0][1]}")
            assert (read.content, read.headers["content-type"]) == (data, "audio/wav")
        for wrong, words in (
            (part(base64_of(data), "mp3"), "WAV"),
            (part(base64_of(picture())), "WAV"),
            (part("%"), "WAV"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                ask(wrong)


def test_responses_take_sounds_also_as_results_of_tools(toy: Toy, tmp_path: Path) -> None:
    data = sound(1)
    part: Any = {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": "wav"}}
    said: Any = {"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}
    with (
        perdure.open(toy("qwen2a")[0], store=tmp_path, n_ctx=8192, slots=2, threads=1, exact=True) as runtime,
        live_server(runtime) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
        server.client() as direct,
    ):

        def ask(*items: Any, **more: Any) -> Any:
            return client.responses.create(
                model="toy", input=list(items), max_output_tokens=8, temperature=0, **more
            )

        reply = ask(said)
        assert reply.output_text == expected(server, perdure.Sound(data), "?")
        # What was sent is shown by its digest, and can be sent so.
        [shown] = direct.get(f"/v1/responses/{reply.id}/input_items").json()["data"]
        kept_sound = {"data": f"sha256:{Image(data).digest}", "format": "wav"}
        assert shown["content"][0] == {"type": "input_audio", "input_audio": kept_sound}
        assert ask({"role": "user", "content": shown["content"]}).output_text == reply.output_text
        more = ask({"role": "user", "content": "and then?"}, previous_response_id=reply.id)
        assert more.usage.input_tokens > 750
        call: Any = {"type": "function_call", "call_id": "call_1", "name": "hear", "arguments": "{}"}
        result: Any = {"type": "function_call_output", "call_id": "call_1", "output": [part]}
        assert ask({"role": "user", "content": "hear"}, call, result).usage.input_tokens > 750
        conversation = client.conversations.create(items=[said])
        [item] = direct.get(f"/v1/conversations/{conversation.id}/items").json()["data"]
        assert item["content"][0] == {"type": "input_audio", "input_audio": kept_sound}
        for wrong, words in (
            ({"data": base64_of(data), "format": "mp3"}, "WAV"),
            ({"data": base64_of(picture()), "format": "wav"}, "WAV"),
            ({"format": "wav"}, "WAV"),
            (None, "data and format"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                ask({"role": "user", "content": [{**part, "input_audio": wrong}]})


def test_h5_f1_an_image_of_one_key_saves_another_key_nothing(toy: Toy, tmp_path: Path) -> None:
    """What the first had encoded is encoded again for the second, and no state is shared: neither an answer
    nor the time that it takes says that somebody has sent it before. Its tokens count as text does."""
    (one, ada), (other, bob) = new_key("ada", tokens_per_day=100), new_key("bob")
    body = {"messages": [asked(FIRST, "what?" + 40 * " w1")], "max_tokens": 2, "temperature": 0}
    with (
        perdure.open(toy("llava")[0], store=tmp_path, n_ctx=4096, slots=2, threads=1) as runtime,
        runtime.events(["ImageEncoded"]) as events,
        live_server(runtime, keys=Keys([ada, bob])) as server,
        server.client(one) as client,
        server.client(other) as stranger,
    ):

        def cached(client: httpx.Client) -> int:
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached(client) == 0
        assert cached(stranger) == 0
        assert cached(stranger) > 64
        assert [event.to_dict()["namespace"] for event in events.poll()] == ["ada", "bob"]
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 429
        assert "100 are allowed" in refused.json()["error"]["message"]
        # To count is to read a header: also of an image that was encoded for another.
        for each in (client, stranger):
            url = {"image_url": url_of(FIRST)}
            assert each.post("/v1/images/count", json=url).status_code in (200, 429)
        assert not events.poll()
