"""The page: first paint of a long session, frames while a reply streams and while one scrolls, its size.

It needs Chromium, and playwright out of `perdure[dev]`. The server runs the toy engine in this process: what
is measured is the page and the way to it, not a model.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import perdure
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_most
from bench.machine import Watch
from perdure.chat.message import Message
from perdure.server.core.server_state import ServerState
from perdure.server.http_server import HttpServer, address, bind
from perdure.sessions.turn import Turn
from perdure.testing.toy import Faults, Gate, ToyModel

TURNS = 2000
SPEED = 200
"""Tokens a second."""
SHORT = 20
"""Turns of the session that the long one is compared with."""
_ANSWER = "Answer number {}: *some* words, `code`, and a [link](https://example.org/). " * 4

_FIRST_PAINT = """() => new Promise(done => {
    const look = () => {
        const turn = document.querySelector('#turn-%d .assistant');
        if (turn && turn.getBoundingClientRect().height) requestAnimationFrame(() => done(performance.now()));
        else requestAnimationFrame(look);
    };
    look();
})"""
_FRAMES = """() => {
    window.frames_ = [];
    let last = performance.now();
    const tick = now => {
        window.frames_.push(now - last);
        last = now;
        window.ticking_ = requestAnimationFrame(tick);
    };
    window.ticking_ = requestAnimationFrame(tick);
}"""


_WRITTEN = """## Part {0}

Some *words* with `code`, a [link](https://example.org/), and a list:

- one that is **bold**
- another with $x^2 + {0}$

```python
def part(number: int) -> str:
    return f"part {{number}}"
```

| tier | tokens |
|:--|--:|
| slot | {0} |
"""
"""What is streamed, again and again: all that Markdown has, so that every frame has something to draw."""
PARTS = 5
SCROLLS, SCROLL = 400, 600
"""Turns of a wheel, and pixels each."""


class PacedGate(Gate):
    """Lets one token through each 1/`speed` of a second; all at once while that is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = 0
        self._next = 0.0

    def wait(self, stop: threading.Event) -> None:
        if not self.speed:
            return
        now = time.perf_counter()
        self._next = max(self._next + 1 / self.speed, now)
        time.sleep(max(0.0, self._next - now))


@contextmanager
def _server(gate: Gate) -> Iterator[tuple[str, perdure.Runtime]]:
    with (
        tempfile.TemporaryDirectory() as store,
        perdure.open(ToyModel(faults=Faults(gate=gate)), n_ctx=4096, slots=2, store=store) as runtime,
    ):
        listening = bind("127.0.0.1", 0)
        listening.listen(64)
        http_server = HttpServer(ServerState(runtime=runtime, name="toy"))
        thread = threading.Thread(target=http_server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield address(listening), runtime
        finally:
            http_server.stop(now=True)
            thread.join()


def _session(runtime: perdure.Runtime, count: int) -> None:
    turns = [Turn(kind="start", messages=())]
    for number in range(1, count + 1):
        turns.append(
            Turn(
                kind="turn",
                messages=(Message(role="user", content=f"Question number {number}"),),
                reply=Message(role="assistant", content=_ANSWER.replace("{}", str(number))),
                finish_reason="stop",
                before=turns[-1].digest,
                created=float(number),
            )
        )
    runtime.sessions.store.create("", f"of-{count}", turns)


@contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    executable = os.environ.get("PLAYWRIGHT_CHROMIUM_EXECUTABLE_PATH") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def _page(browser: Any) -> Any:
    """A page of a browser with nothing in its cache."""
    return browser.new_context(viewport={"width": 1280, "height": 860}).new_page()


def _frames_told(page: Any) -> list[float]:
    """The milliseconds between all frames since `_FRAMES` began to count."""
    told: list[float] = page.evaluate(
        "() => { cancelAnimationFrame(window.ticking_); return window.frames_; }"
    )
    return told


def first_paint(run: Run) -> Iterator[Figure]:
    """From opening the address of a session to its last turn on the screen."""
    with Watch() as watch, _server(PacedGate()) as (url, runtime), _browser() as browser:
        times: dict[int, list[float]] = {TURNS: [], SHORT: []}
        for count in times:
            _session(runtime, count)
        for _ in range(run.pick(9, 3)):
            for count, found in times.items():
                page = _page(browser)
                page.goto(f"{url}/#/c/of-{count}", wait_until="commit")
                found.append(page.evaluate(_FIRST_PAINT % count) / 1000)
                page.context.close()
    yield Figure(
        name=f"first paint of a session of {TURNS} turns",
        against=f"one of {SHORT}",
        unit="s",
        gauge=Gauge.GROWTH,
        pairs=Pairs(tuple(times[TURNS]), tuple(times[SHORT])),
        target=at_most(1, "s"),
        machine=watch.machine,
    )


def frames(run: Run) -> Iterator[Figure]:
    """The longest time between two frames while a reply streams, and while nothing does."""
    gate = PacedGate()
    longest: list[float] = []
    idle: list[float] = []
    written = "\n".join(_WRITTEN.format(number) for number in range(PARTS)).strip()
    # The toy is held to write just this.
    settings = {"regex": re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", written)}
    with Watch() as watch, _server(gate) as (url, runtime), _browser() as browser:
        for number in range(run.pick(5, 1)):
            session = runtime.sessions.create(f"stream-{number}", settings=settings)
            page = _page(browser)
            page.goto(f"{url}/#/c/{session.name}")
            page.get_by_label("Message", exact=True).fill("Go on")
            for found in (idle, longest):
                gate.speed = SPEED if found is longest else 0
                page.evaluate(_FRAMES)
                if found is longest:
                    page.keyboard.press("Enter")
                    page.locator("article.turn:not(.pending) .reuse").wait_for(timeout=120_000)
                else:
                    page.wait_for_timeout(2000)
                told = _frames_told(page)
                found.append(max(told))
            [turn] = session.history()
            assert turn.text == written
            tokens, seconds = turn.counts["completion_tokens"], turn.counts["decode_ms"] / 1000
            print(
                f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} a second; {len(told)} frames, "
                f"the longest {max(told):.0f} ms, {sum(each > 50 for each in told)} above 50 ms"
            )
            page.context.close()
    yield Figure(
        name=f"longest frame of all at {SPEED} tokens/s",
        against="while nothing streams",
        unit="ms",
        gauge=Gauge.GROWTH,
        pairs=Pairs((max(longest),), (max(idle),)),
        target=at_most(100, "ms"),
        machine=watch.machine,
    )


def scrolling(run: Run) -> Iterator[Figure]:
    """The longest time between two frames while a long session is scrolled through, and while it is not."""
    moved: list[float] = []
    still: list[float] = []
    with Watch() as watch, _server(PacedGate()) as (url, runtime), _browser() as browser:
        _session(runtime, TURNS)
        for _ in range(run.pick(5, 1)):
            page = _page(browser)
            page.goto(f"{url}/#/c/of-{TURNS}", wait_until="commit")
            page.evaluate(_FIRST_PAINT % TURNS)
            page.mouse.move(640, 430)
            for found in (still, moved):
                page.evaluate(_FRAMES)
                for _ in range(SCROLLS):
                    if found is moved:
                        page.mouse.wheel(0, -SCROLL)
                    page.wait_for_timeout(16)
                told = _frames_told(page)
                found.append(max(told))
            shown = page.locator("article.turn").count()
            print(
                f"{shown} turns were shown; {len(told)} frames, {sum(each > 50 for each in told)} above 50 ms"
            )
            page.context.close()
    yield Figure(
        name=f"longest frame while a session of {TURNS} turns is scrolled through",
        against="while it stands still",
        unit="ms",
        gauge=Gauge.GROWTH,
        pairs=Pairs((max(moved),), (max(still),)),
        target=at_most(100, "ms"),
        machine=watch.machine,
    )


def size(run: Run) -> Iterator[Figure]:
    """All scripts of the page, compressed."""
    folder = Path(perdure.__file__).parent / "server" / "page" / "page"
    scripts = [path.read_bytes() for path in folder.glob("*.js")]
    packed = sum(len(gzip.compress(script, 9)) for script in scripts)
    with Watch() as watch:
        pass
    yield Figure(
        name="scripts, compressed",
        against="as they are",
        unit="KiB",
        gauge=Gauge.COST,
        pairs=Pairs((packed / 1024,), (sum(map(len, scripts)) / 1024,)),
        target=at_most(170, "KiB"),
        machine=watch.machine,
    )


main = Bench("page", (first_paint, frames, scrolling, size))

if __name__ == "__main__":
    sys.exit(main())
