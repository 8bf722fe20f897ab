"""Programs that use one store: each a separate process that does what it is told, a line at a time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import perdure
from perdure import PerdureError
from perdure.testing.toy import Faults, Gate, ToyModel

TESTS = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


class FileGate(Gate):
    """Holds the engine for as long as a file is there: a test makes it, and deletes it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def wait(self, stop: threading.Event) -> None:
        while self._file.exists() and not stop.wait(0.01):
            pass


def hold_file(store: Path) -> Path:
    """While it is there, the engines of programs with `pace` are held."""
    return store.parent / "hold"


def model(store: Path, pace: float) -> ToyModel:
    return ToyModel(faults=Faults(pace=pace, gate=FileGate(hold_file(store)) if pace else None))


class Program:
    """A process with a runtime on the store."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ext.workers.programs", str(store), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=TESTS,
            text=True,
        )
        self._heard = b""

    def tell(self, what: str, *args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, *args]) + "\n")
        self.process.stdin.flush()

    def hear(self, timeout: float = 60) -> Any:
        """The next line that it says."""
        assert self.process.stdout is not None
        # Not by readline: lines that came together would lie in its buffer, where select does not see them.
        pipe = self.process.stdout.fileno()
        while b"\n" not in self._heard:
            more = os.read(pipe, 1 << 16) if select.select([pipe], [], [], timeout)[0] else b""
            assert more, f"the program said nothing within {timeout} seconds"
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def ask(self, what: str, *args: Any) -> Any:
        self.tell(what, *args)
        return self.hear()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def program(store: Path, **options: Any) -> Iterator[Program]:
    """A program that is open, and killed at the end if it still runs."""
    found = Program(store, **options)
    try:
        assert found.hear()["open"]
        yield found
    finally:
        with suppress(ProcessLookupError):
            found.process.kill()
        found.process.communicate()


def main(store: str, options: dict[str, Any]) -> None:
    pace = options.pop("pace", 0.0)
    try:
        engine = model(Path(store), pace)
        runtime = perdure.open(engine, store=store, template=_template(Path(store)), **options)
    except PerdureError as error:
        _say({"open": False, "error": type(error).__name__, "message": str(error)})
        return
    with runtime:
        _say({"open": True})
        for line in sys.stdin:
            what, *args = json.loads(line)
            if what == "close":
                break
            try:
                _say(getattr(sys.modules[__name__], f"do_{what}")(runtime, *args))
            except PerdureError as error:
                _say({"error": type(error).__name__, "message": str(error)})
    _say({"closed": True})


def do_holder(runtime: perdure.Runtime) -> Any:
    """Whose engine this program uses: None is its own."""
    holder = getattr(runtime.backend, "holder", None)
    return None if holder is None else holder.pid


def do_say(runtime: perdure.Runtime, session: str, text: str, tokens: int = 6, **more: Any) -> Any:
    reply = runtime.session(session).say(text, max_tokens=tokens, temperature=0, ignore_eos=True)
    return {
        "text": reply.text,
        "kept": reply.kept,
        "why": reply.not_kept,
        "cached": reply.usage.cached_tokens,
    }


def do_begin(runtime: perdure.Runtime, session: str, text: str, tokens: int) -> Any:
    """Begin a turn and say when its first token has come; what comes of it is said next."""
    job = runtime.session(session).submit(text, max_tokens=tokens, temperature=0, ignore_eos=True)
    for number, _ in enumerate(job):
        if not number:
            _say({"begun": True})
    reply = job.reply()
    return {"text": reply.text, "kept": reply.kept, "why": reply.not_kept, "end": reply.finish_reason}


def do_turns(runtime: perdure.Runtime, session: str) -> Any:
    found = runtime.session(session, create=False).history()
    return [turn.messages[0].content for turn in found]


def do_generate(runtime: perdure.Runtime, prompt: str, tokens: int = 8) -> Any:
    return runtime.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True).text


def do_progress(runtime: perdure.Runtime, tokens: int) -> Any:
    """How much of a prompt was read when that was first told."""
    job = runtime.submit([65] * tokens, max_tokens=1)
    while not (found := job.prompt_read) and not job.done:
        job.output.wait(timeout=0.05)
    job.cancel()
    return found


def do_delete(runtime: perdure.Runtime, session: str) -> Any:
    runtime.sessions.delete(session)
    return True


def do_rewind(runtime: perdure.Runtime, session: str) -> Any:
    runtime.session(session, create=False).rewind()
    return True


def do_talk(runtime: perdure.Runtime, session: str, seconds: float) -> Any:
    """Take turns until the time is up: those that were kept, and whatever went wrong."""
    end = time.monotonic() + seconds
    kept: list[str] = []
    errors: list[str] = []
    while time.monotonic() < end:
        text = f"{os.getpid()}-{len(kept)}-{len(errors)}"
        try:
            reply = runtime.session(session).say(
                text, max_tokens=4, temperature=0, ignore_eos=True, overflow="drop_oldest"
            )
        except PerdureError as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        (kept if reply.kept else errors).append(text if reply.kept else str(reply.not_kept))
    return {"kept": kept, "errors": errors}


def _template(store: Path) -> str:
    path = store.parent / "chat.jinja"
    with suppress(FileExistsError), path.open("x") as file:
        file.write(TEMPLATE)
    return str(path)


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
