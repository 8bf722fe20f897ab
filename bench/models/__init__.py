"""Does everything work with this model? `make models MODELS="a.gguf owner/repo:Q4_K_M"` writes a table.

For each model: six rounds of chat, a tool call, sleep in one runtime and wake in another, a fork, a step
back, an answer from kept state against that of a fresh runtime, K/V types by perplexity, and speed. Vectors
of an encoder are made twice, a reranker's scores ranked. A column says `yes`, a figure, or what went wrong.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import perdure
from bench.machine import Watch
from perdure import PerdureError, Runtime

ROUNDS = (
    "Hello! Who are you?",
    "Name a colour.",
    "And another one?",
    "What did I ask first?",
    "Write a short sentence about the sea.",
    "Thank you. Goodbye!",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
COLUMNS = (
    "model",
    "kind",
    "chat",
    "tools",
    "sleep and wake",
    "fork",
    "rewind",
    "warm is cold",
    "q8_0 K/V",
    "q4_0 K/V",
    "prefill tok/s",
    "decode tok/s",
)
TEXT = Path(__file__).parents[2] / "docs" / "sessions.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of the models that are named, and write it to `--out`."""
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__)
    parser.add_argument("models", nargs="*", default=["default"], help="files or names")
    parser.add_argument("--out", type=Path, help="write the table here too")
    parser.add_argument("--threads", type=int, help="threads of the engine")
    parser.add_argument("--template", help="the chat template of models that bring none")
    parser.add_argument("--quick", action="store_true", help="shorter replies and texts")
    asked = parser.parse_args(arguments)
    rows = []
    with Watch() as watch:
        for name in asked.models:
            trial = Trial(name, threads=asked.threads, quick=asked.quick, template=asked.template)
            rows.append(trial.row())
            print(" | ".join(rows[-1]), flush=True)
    text = f"{table(rows)}\n\n{watch.machine}"
    print(f"\n{text}")
    if asked.out:
        asked.out.write_text(f"{text}\n", encoding="utf-8")
    return 0


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


class Trial:
    """One model through everything. Each column is tried alone: one that fails costs no other."""

    def __init__(
        self, name: str, *, threads: int | None = None, quick: bool = False, template: str | None = None
    ) -> None:
        self.name = name
        self._template = template
        self._threads = threads
        self._reply = 8 if quick else 32
        self._window = 64 if quick else 256
        self._windows = 4 if quick else 8

    def row(self) -> list[str]:
        folder = Path(tempfile.mkdtemp(prefix="perdure-models-"))
        try:
            with self._open(None) as runtime:
                label = Path(str(getattr(runtime.model, "path", self.name))).name
                kind = _kind(runtime)
                if not _writes(runtime):
                    shown = _tried(lambda: _encoded(runtime))
                    return [label, kind, shown, *["–"] * (len(COLUMNS) - 3)]
            cells = self._cells(folder)
            return [label, kind, *cells]
        except PerdureError as error:
            return [self.name, f"cannot be opened: {error}"[:120], *["–"] * (len(COLUMNS) - 2)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _cells(self, folder: Path) -> Iterator[str]:
        with self._open(folder) as runtime:
            yield _tried(lambda: self._chat(runtime))
            yield _tried(lambda: _tools(runtime))
            _tried(lambda: _sleep(runtime))
        with self._open(folder) as runtime:
            yield _tried(lambda: _wake(runtime, self._reply))
            yield _tried(lambda: self._fork(runtime))
            yield _tried(lambda: self._rewind(runtime))
        yield _tried(self._warm)
        for kind in ("q8_0", "q4_0"):
            yield _tried(lambda kind=kind: self._loss(folder, kind))  # type: ignore[misc]
        yield from self._speed()

    @contextmanager
    def _open(self, store: Path | None, *, cache: int | None = None) -> Iterator[Runtime]:
        with perdure.open(
            self.name,
            store=store,
            n_ctx=2048,
            slots=2,
            exact=True,
            cache=cache,
            threads=self._threads,
            template=self._template,
        ) as runtime:
            yield runtime

    def _chat(self, runtime: Runtime) -> str:
        session = runtime.session("rounds")
        for message in ROUNDS:
            session.say(message, max_tokens=self._reply, temperature=0)
        turns = len(session.history())
        return "yes" if turns == len(ROUNDS) else f"{turns} of {len(ROUNDS)} turns kept"

    def _fork(self, runtime: Runtime) -> str:
        session = runtime.session("rounds")
        other = session.fork("branch")
        message = "One more question: why?"
        first, second = (
            each.say(message, max_tokens=self._reply, temperature=0) for each in (session, other)
        )
        return "yes" if first.text == second.text else "the branch answers otherwise"

    def _rewind(self, runtime: Runtime) -> str:
        session = runtime.session("rounds")
        message = "And how?"
        before = session.say(message, max_tokens=self._reply, temperature=0).text
        session.rewind(turns=1)
        again = session.say(message, max_tokens=self._reply, temperature=0).text
        return "yes" if before == again else "another answer after going back"

    def _warm(self) -> str:
        """The same prompt, read on top of what is kept, and in a runtime that keeps nothing."""
        text = TEXT.read_text(encoding="utf-8")[:1200]
        with self._open(None) as runtime:
            runtime.generate(text[:800], max_tokens=4, temperature=0)
            runtime.generate("Something else.", max_tokens=4, temperature=0)
            warm = runtime.generate(text, max_tokens=self._reply, temperature=0, ignore_eos=True)
        with self._open(None, cache=0) as runtime:
            cold = runtime.generate(text, max_tokens=self._reply, temperature=0, ignore_eos=True)
        if warm.tokens != cold.tokens:
            return "NO: another answer from kept state"
        return f"yes, {warm.reuse.reused} tokens reused"

    def _loss(self, folder: Path, kind: str) -> str:
        """Perplexity with K and V in another type, divided by that with f16."""
        place = folder / "text.txt"
        if not place.exists():
            text = TEXT.read_text(encoding="utf-8")
            with self._open(None) as runtime:
                tokens = runtime.model.tokenize(text)[: self._window * self._windows]
                place.write_text(runtime.model.detokenize(tokens), encoding="utf-8")
        first, second = (
            perdure.evaluate(
                self.name,
                place,
                window=self._window,
                stride=self._window // 2,
                slots=2,
                threads=self._threads,
                k_type=each,
                v_type=each,
                resume=False,
            ).metrics["perplexity"]["value"]
            for each in ("f16", kind)
        )
        return f"x{second / first:.4f}"

    def _speed(self) -> Iterator[str]:
        try:
            with self._open(None, cache=0) as runtime:
                text = TEXT.read_text(encoding="utf-8")[:2000]
                reply = runtime.generate(text, max_tokens=64, temperature=0, ignore_eos=True)
            yield f"{reply.timings.prefill_speed:.0f}"
            yield f"{reply.timings.decode_speed:.0f}"
        except PerdureError as error:
            yield from (str(error)[:60], "–")


def _kind(runtime: Runtime) -> str:
    info = runtime.model.info
    size = f", {info.nbytes / 1e6:.1f} MB" if info.nbytes else ""
    kind = info.quantisation or "unknown type"
    return f"{info.architecture}, {runtime.model.memory.name}, {kind}{size}"


def _writes(runtime: Runtime) -> bool:
    """Whether the model writes at all: an encoder reads texts whole, and gives vectors or scores."""
    try:
        runtime.generate("Hello", max_tokens=1, temperature=0)
    except PerdureError:
        return False
    return True


def _encoded(runtime: Runtime) -> str:
    if runtime.model.info.pair is not None:
        ranked = runtime.rank("the sea", ["a mountain", "the sea is blue"])
        return f"ranks; best {ranked[0].index}"
    vectors = runtime.embed(["the sea", "the sea", "a mountain"]).vectors
    same = np.array_equal(vectors[0], vectors[1])
    return f"vectors of {vectors.shape[1]}" if same else "NO: two vectors for one text"


def _tools(runtime: Runtime) -> str:
    reply = runtime.chat(
        [{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=96,
        temperature=0,
    )
    if not reply.tool_calls:
        return "no call"
    call = reply.tool_calls[0]
    return "yes" if call.name == "weather" and isinstance(call.parsed.get("city"), str) else "another call"


def _sleep(runtime: Runtime) -> str:
    runtime.session("rounds").sleep()
    return ""


def _wake(runtime: Runtime, length: int) -> str:
    report = runtime.session("rounds").wake()
    reply = runtime.session("rounds").say("Are you awake?", max_tokens=length, temperature=0)
    read = reply.reuse.computed if reply.reuse is not None else -1
    return f"yes, {report.reused} tokens back, {read} read"


def _tried(what: Callable[[], str]) -> str:
    try:
        return what()
    except PerdureError as error:
        return f"{type(error).__name__}: {error}"[:90]
