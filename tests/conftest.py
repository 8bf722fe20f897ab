"""Fixtures that every test can ask for."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

import built  # noqa: F401 (first: the others import what it compiles)
import kinds
import subjects
import zoo
from perdure import request_options as settings_of_a_draw
from perdure.engine.llama.native.choice import choose
from perdure.extension import extensions
from subjects import Subject
from zoo import folders

# Whoever starts the tests in the background may have them ignore Ctrl-C, and what they start would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of processes: where no bytecode is written, as in many containers, each compiles all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine is no reason for a test to fail.
settings.register_profile("perdure", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A quarter of the examples, and the same ones in every run, where a change is judged at once.
settings.register_profile("quick", settings.get_profile("perdure"), max_examples=25, derandomize=True)
settings.load_profile("quick" if os.environ.get("PERDURE_TESTS") == "quick" else "perdure")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have the llama.cpp library before the workers start: it is fetched once, into the usual place."""
    if not hasattr(session.config, "workerinput"):
        choose()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without an extension there are no tests of it."""
    folder = Path(__file__).parent / "ext"
    if folder in collection_path.parents:
        name = collection_path.relative_to(folder).parts[0]
        return True if (folder / name).is_dir() and name not in extensions() else None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what a test starts and when it runs, and skip what needs an extension that is not there."""
    for item in kinds.later(items):
        item.add_marker("full")
    for item in items:
        item.add_marker(kinds.kind_of(item))
        names = {name for mark in item.iter_markers("extension") for name in mark.args}
        if missing := sorted(names - extensions().keys()):
            item.add_marker(pytest.mark.skip(reason=f"needs the extension {', '.join(missing)}"))


@pytest.fixture(scope="session", autouse=True)
def measurements(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is measured of this machine, each worker takes from the one that needed it first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        subjects.measurements = tmp_path_factory.getbasetemp().parent


@pytest.fixture(autouse=True)
def drawn_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process draws without a seed, a test draws alike in every run: one reply in a hundred ends at
    its first token, and a test that minds has to fail at once."""
    drawn = random.Random(request.node.nodeid)
    monkeypatch.setattr(settings_of_a_draw, "secrets", SimpleNamespace(randbelow=drawn.randrange))


@pytest.fixture(scope="session")
def zoo_path(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`zoo_path("llama")` is the file of that toy model, written once for all workers and runs. Without
    pytest's cache (`-p no:cacheprovider`), for this run alone."""
    cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)
    make = tmp_path_factory.mktemp if cache is None else cache.mkdir
    folder, others = make(f"zoo-{zoo.digest()}"), make(f"folders-{folders.digest()}")

    def path(name: str) -> Path:
        if name in subjects.MLX:
            kind = subjects.MLX[name]
            with FileLock(others / "writing.lock"):
                return others / kind if (others / kind / "done").exists() else folders.write(kind, others)
        written = folder / f"{name}.gguf"
        # A worker may have loaded a file that another one would put anew in its place.
        with FileLock(folder / "writing.lock"):
            return written if written.exists() else zoo.write(name, folder)

    return path


@pytest.fixture(scope="session")
def find_subject(zoo_path: Callable[[str], Path]) -> Callable[[str], Subject]:
    """`find_subject("gemma3")` is that model, opened once."""
    known: dict[str, Subject] = {}

    def find(name: str) -> Subject:
        if name not in known:
            known[name] = subjects.find(name, zoo_path)
        return known[name]

    return find


@pytest.fixture(params=subjects.every(subjects.NAMES))
def subject(request: pytest.FixtureRequest, find_subject: Callable[[str], Subject]) -> Subject:
    """Every model in turn: the toy engine's kinds of memory, then the zoo on llama.cpp, then on MLX."""
    return find_subject(request.param)
