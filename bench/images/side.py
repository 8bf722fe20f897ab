"""The processes of the two sides: perdure with its sessions, and llama-server out of `xllamacpp`.

    python -m bench.images.side perdure | llama-server | counted

Each answers how many tokens a prompt had and how many were computed for it.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from bench.child import serve

N_CTX = 8192
SLOTS = 2
WRITTEN = 8
SYSTEM = " ".join(f"w{number}" for number in range(50, 90))


class Answer(TypedDict):
    """Tokens of a prompt, of it computed, and of the reply."""

    prompt: int
    computed: int
    written: int


def screenshot(number: int) -> bytes:
    """A PNG of noise."""
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 255, (160, 120, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Perdure:
    """Sessions of one runtime after another, over one store."""

    def __init__(self) -> None:
        self._rt: Any = None
        self._encoded = 0

    def open(self, model: str, projector: str, store: str) -> None:
        import perdure

        self.close()
        self._rt = perdure.open(model, store=store, n_ctx=N_CTX, slots=SLOTS, threads=1)

    def close(self) -> None:
        if self._rt is not None:
            self._encoded = self.encoded()
            self._rt.close()
            self._rt = None

    def ask(self, conversation: str, text: str, image: int | None, fork_of: str) -> Answer:
        from perdure import Image

        if fork_of:
            self._rt.session(fork_of).fork(conversation)
        session = self._rt.session(conversation, system=None if fork_of else SYSTEM)
        said: Any = text
        if image is not None:
            said = {"role": "user", "content": [text, Image(screenshot(image)), " w7"]}
        reply = session.say(said, max_tokens=WRITTEN, temperature=0, ignore_eos=True)
        return Answer(
            prompt=reply.usage.prompt_tokens,
            computed=reply.usage.prompt_tokens - reply.usage.cached_tokens,
            written=reply.usage.completion_tokens,
        )

    def encoded(self) -> int:
        """Files that were encoded."""
        images = None if self._rt is None else vars(self._rt.chat_format)["_images"]
        return self._encoded + (0 if images is None else images.encoded)


class Counted(Perdure):
    """The same, and how many functions are called for a token of a reply without images."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        # All threads that begin from here on, that of the engine among them.
        threading.setprofile(self._count)

    def _count(self, frame: object, event: str, of: object) -> None:
        self._calls += event in ("call", "c_call")

    def calls(self) -> float:
        """For each token of a reply: what 320 of them cost more than 64."""
        few, more = (self._calls_for(count) for count in (64, 320))
        return (more - few) / (320 - 64)

    def _calls_for(self, count: int) -> int:
        asked = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "loop_guard": 0}
        # What is done once is done before.
        for _ in range(2):
            before = self._calls
            self._rt.generate("w1 w2", **asked)
        return self._calls - before


class LlamaServer:
    """One server after another. Clients of it have their conversations themselves, and send all of them."""

    def __init__(self) -> None:
        self._said: dict[str, list[Any]] = {}
        self._log = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - lives as long as the process
        descriptor = os.open(self._log.name, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 2)

    def open(self, model: str, projector: str, store: str) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.mmproj.path = model, projector
        params.n_ctx, params.n_parallel, params.warmup = N_CTX * SLOTS, SLOTS, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        # It logs each encoding at this level.
        params.verbosity = 4
        self._server = xllamacpp.Server(params)
        self._url = str(self._server.listening_address)

    def close(self) -> None:
        del self._server

    def ask(self, conversation: str, text: str, image: int | None, fork_of: str) -> Answer:
        import httpx

        said = self._said.get(fork_of or conversation, [{"role": "system", "content": SYSTEM}])
        content: list[Any] = [{"type": "text", "text": text}]
        if image is not None:
            url = "data:image/png;base64," + base64.b64encode(screenshot(image)).decode()
            content += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": " w7"}]
        said = [*said, {"role": "user", "content": content}]
        body = {"messages": said, "max_tokens": WRITTEN, "temperature": 0, "ignore_eos": True}
        url = f"{self._url}/v1/chat/completions"
        answer: Any = httpx.post(url, json=body, timeout=600, trust_env=False).raise_for_status().json()
        message = answer["choices"][0]["message"]
        self._said[conversation] = [*said, {"role": "assistant", "content": message["content"]}]
        timings, usage = answer["timings"], answer["usage"]
        return Answer(
            prompt=usage["prompt_tokens"], computed=timings["prompt_n"], written=usage["completion_tokens"]
        )

    def encoded(self) -> int:
        """Media that were encoded, by its log."""
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        batches = [line.rsplit("n_chunks = ", 1)[-1] for line in lines if "encoding mtmd batch" in line]
        return sum(map(int, batches))

    def said(self) -> dict[str, list[Any]]:
        """What its clients have of their conversations."""
        return self._said

    def remember(self, said: dict[str, list[Any]]) -> None:
        self._said = said


if __name__ == "__main__":
    side: Any = {"perdure": Perdure, "counted": Counted, "llama-server": LlamaServer}[sys.argv[1]]()
    serve({name: getattr(side, name) for name in dir(side) if not name.startswith("_")})
