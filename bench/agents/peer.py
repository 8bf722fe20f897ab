"""llama-server out of `xllamacpp` on the trace of an agent, with a tiny model of random weights.

It gets prompts as the template writes them, and writes the answers of the trace by a grammar. It says itself
how many tokens of each prompt it computed. `python -m bench.agents.peer` is the process that it lives in.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import jinja2

from bench.agents.trace import REASONING, Ask
from bench.child import ROOT, Child, serve

_N_CTX = 16_384
_SLOTS = 4


def llama_server(asks: Sequence[Ask], new: Sequence[int], template: str, *, drops: bool) -> float:
    """Tokens that it computed before first tokens, as parts of the new ones."""
    # `tojson` of jinja2 escapes for HTML, that of chat templates does not.
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = json.dumps
    rendered = environment.from_string(template)
    computed = least = 0.0
    with tempfile.TemporaryDirectory() as folder, Child("bench.agents.peer") as child:
        url = str(child.ask("open", path=toy_model(Path(folder))))
        with httpx.Client(base_url=url, trust_env=False, timeout=600) as client:
            for ask, count in zip(asks, new, strict=True):
                prompt = rendered.render(messages=ask.messages, tools=ask.tools, add_generation_prompt=True)
                said = f"{REASONING}</think>{ask.answer}" if drops else ask.answer
                body = {
                    "prompt": prompt,
                    "n_predict": 400,
                    "grammar": f"root ::= {json.dumps(said)}",
                    "cache_prompt": True,
                }
                answer: dict[str, Any] = client.post("/completion", json=body).raise_for_status().json()
                timings = answer["timings"]
                computed += timings["prompt_n"]
                # Its tokens are not bytes: as many of them are new as of the characters.
                least += count * answer["tokens_evaluated"] / len(ask.texts[0])
    return computed / least


def toy_model(folder: Path) -> str:
    """A model of the tests' zoo."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        zoo = importlib.import_module("zoo")
    finally:
        sys.path.remove(str(ROOT / "tests"))
    path: Path = zoo.write("llama", folder)
    # It says that it was trained for 4,096 tokens, and llama-server gives a slot no more than that.
    key = b"llama.context_length" + (4).to_bytes(4, "little")
    data = path.read_bytes()
    at = data.index(key) + len(key)
    path.write_bytes(data[:at] + _N_CTX.to_bytes(4, "little") + data[at + 4 :])
    return str(path)


class LlamaServer:
    """The process that llama-server lives in."""

    def open(self, path: str) -> str:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = _N_CTX * _SLOTS, _SLOTS
        # Work is counted, not time: one thread has none to wait for.
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)
        return str(self._server.listening_address)


if __name__ == "__main__":
    serve({"open": LlamaServer().open})
