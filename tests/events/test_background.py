"""A thread that ends says so (class 5): it is logged and counted, and loops run again, whatever was raised.

`Panic` stands for what no `except Exception` sees: `SystemExit`, and the panics of native libraries.
"""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import perdure
from cache.test_tiers import ShelfTier
from decode.observed import open_toy
from inside import inside
from perdure import system
from perdure.atomic import atomic_write
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.chat.prefetch import Prefetcher
from perdure.decode.request import ReuseReport, Timings, Usage
from perdure.engine import parallel
from perdure.engine.context.guarded_core import stopped_by_ctrl_c
from perdure.errors import StoreError
from perdure.events import background
from perdure.events.background import FAILURES, BackgroundThread, BackgroundTimer
from perdure.events.event import Restarted
from perdure.events.hub import EventHub
from perdure.server.core import keys as keys_module
from perdure.server.core import metrics, server_state
from perdure.server.core.keys import Keys, KeyUsage, new_key
from perdure.server.core.metrics import DailyReports, RecentRequest
from perdure.server.http_server import LoopWatch
from perdure.server.pool import ModelPool
from perdure.sessions import pending_turn
from perdure.sessions.listener import Listener
from perdure.sessions.pending_turn import PendingTurns
from perdure.store.index import Index
from perdure.store.owner import StoreOwner
from perdure.store.table_check import TableCheck
from perdure.system import processes
from perdure.testing.toy import Faults, ToyModel
from server.live_server import hello, live_server
from store.chains import chain, same

SOURCE = Path(perdure.__file__).parent
TESTS = Path(__file__).parents[1]
PATIENCE = 60


class Panic(BaseException):
    """What a defect may raise."""


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(background, "_PAUSE", 0.001)
    # Python's own words about a thread that ended are not what is tested here.
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    FAILURES.clear()
    yield
    FAILURES.clear()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


class Once:
    """Fails at its first call; `again` is set by the second."""

    def __init__(self, answer: Callable[..., Any] = lambda *_: None) -> None:
        self._answer = answer
        self._calls = 0
        self.again = threading.Event()

    def __call__(self, *values: Any) -> Any:
        self._calls += 1
        if self._calls == 1:
            raise Panic("planted")
        self.again.set()
        return self._answer(*values)

    def wait(self) -> None:
        assert self.again.wait(PATIENCE), "the thread is gone"


def started_threads(*names: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls of these names in the source, with their places."""
    for file in SOURCE.rglob("*.py"):
        text = file.read_text("utf-8")
        if not any(f"{name}(" in text for name in names):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield f"{file.relative_to(SOURCE)}:{node.lineno}", node


def test_every_thread_of_the_source_is_one_that_says_when_it_fails() -> None:
    bare = [place for place, _ in started_threads("threading.Thread", "Thread", "threading.Timer", "Timer")]
    # Separate processes, which end with their one thread, or by their timer.
    own = ("decode/sampling/grammar_child.py", "ext/images/child.py")
    assert [each for each in bare if not each.startswith(own)] == []


HERE = "events/test_background.py"
WORKERS = "ext/workers/test_threads.py"
TERMINAL = "test_whatever_is_raised_is_logged_and_counted_and_a_loop_runs_again"
PLANTED = {
    "": (HERE, "test_writing_behind", "test_the_lists_of_a_shared_place"),
    "perdure-analysis": ("ext/inspection/test_routes.py", "test_an_analysis_that_exits_ends_for_its_client"),
    "perdure-assist": (HERE, "test_a_helper_that_fails_is_idle_again"),
    "perdure-attached": (
        "ext/workers/test_sharing.py",
        "test_whoever_waits_for_an_engine_hears_that_none_comes",
    ),
    "perdure-call": (WORKERS, "test_a_call_in_the_engines_process_is_answered"),
    "perdure-check": (HERE, "test_a_check_that_fails_finds_nothing_sound"),
    "perdure-connection": ("ext/workers/test_connection.py", "test_what_a_sender_left_is_sent_by_the_next"),
    "perdure-ctrl-c": (HERE, "test_the_thread_that_waits_for_ctrl_c"),
    "perdure-encoder": (HERE, "test_a_timer_that_fails_says_so"),
    "perdure-engine": (HERE, "test_ready_says_which_threads_failed_and_refuses_where_the_engine_did"),
    "perdure-folders": (
        "ext/model_folders/test_watch.py",
        "test_a_look_that_fails_is_told_and_followed_by_the_next",
    ),
    "perdure-gpu-reader": (HERE, "test_a_timer_that_fails_says_so"),
    "perdure-grammar": (HERE, "test_a_timer_that_fails_says_so"),
    "perdure-image-fetch": (HERE, "test_a_timer_that_fails_says_so"),
    "perdure-image-name": (
        "ext/images/test_links.py",
        "test_a_resolver_that_fails_in_any_way_is_told_and_the_image_refused",
    ),
    "perdure-keys": (HERE, "test_the_keys_of_a_database"),
    "perdure-leases": ("ext/cluster/test_postgres.py", "test_leases_are_renewed_by_a_thread_that_goes_on"),
    "perdure-launch-kill": (HERE, "test_a_timer_that_fails_says_so"),
    "perdure-launch-title": (HERE, TERMINAL),
    "perdure-listener": (HERE, "test_the_listener_of_a_store"),
    "perdure-loop-watch": (HERE, "test_the_watch_of_the_event_loop"),
    "perdure-notice": (HERE, "test_a_timer_that_fails_says_so"),
    "perdure-observer": (HERE, "test_an_observer_that_fails_gets_the_next_event"),
    "perdure-otel": ("ext/otel/test_otel.py", "test_spans_behind_a_batch_whose_sending_fails_are_sent"),
    "perdure-pending": (HERE, "test_what_is_written_behind_a_reply"),
    "perdure-pool": (HERE, "test_the_pool"),
    "perdure-prefetch": (HERE, "test_prefetching_goes_on_with_what_is_due_next"),
    "perdure-pdf": (HERE, "test_a_timer_that_fails_says_so"),
    "perdure-probe": (HERE, "test_a_timer_that_fails_says_so"),
    "perdure-pull": ("ext/fetching/test_pulls.py", "test_a_pull_that_breaks_leaves_the_next_one_free"),
    "perdure-pulse": (WORKERS, "test_the_pulse_of_the_engines_process"),
    "perdure-reading": (HERE, TERMINAL),
    "perdure-report": (HERE, "test_a_report_that_fails_is_written_after_the_next_request"),
    "perdure-service": (
        "ext/workers/test_threads.py",
        "test_another_program_that_was_not_served_comes_again",
    ),
    "perdure-usage": (HERE, "test_the_usage_of_keys_is_written_after_the_next_request"),
    "perdure-wake-reader": (HERE, TERMINAL),
    "perdure-warm": (HERE, "test_a_service_that_fails_costs_no_request"),
    "perdure-worker": (WORKERS, "test_a_model_that_is_loaded_in_the_background"),
}
"""The file and the tests that plant a failure in a thread, by its name; "" is for tiers, whose names it has.
Nobody waits for those that draw in a terminal."""


def test_a_failure_is_planted_in_every_thread_of_the_source() -> None:
    """A new one without a test fails here."""
    names = set()
    for _, call in started_threads("BackgroundThread", "BackgroundTimer"):
        [name] = [each.value for each in call.keywords if each.arg == "name"]
        names.add(name.value if isinstance(name, ast.Constant) else "")
    assert names == set(PLANTED)
    for file, *tests in PLANTED.values():
        text = (TESTS / file).read_text("utf-8")
        assert [test for test in tests if f"def {test}(" not in text] == []


@pytest.mark.parametrize(
    "error", [Panic("planted"), SystemExit(1), KeyboardInterrupt(), ValueError("planted")]
)
def test_whatever_is_raised_is_logged_and_counted_and_a_loop_runs_again(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    left = [error, error]

    def loop() -> None:
        if left:
            raise left.pop()

    thread = BackgroundThread(loop, name="perdure-planted", restart=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert FAILURES == {"perdure-planted": 2}
    assert caplog.text.count("the thread perdure-planted failed, and is started again") == 2

    def job() -> None:
        raise error

    ended = BackgroundThread(job, name="perdure-job")
    ended.start()
    ended.join(PATIENCE)
    assert FAILURES["perdure-job"] == 1
    assert "the thread perdure-job failed, and has ended" in caplog.text


def test_ready_says_which_threads_failed_and_refuses_where_the_engine_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_toy(slots=1) as rt, live_server(rt) as server, server.client() as client:
        assert client.get("/ready").json()["failed_threads"] == {}
        thread = BackgroundThread(Once(), name="perdure-planted", restart=True)
        thread.start()
        thread.join(PATIENCE)
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()["failed_threads"]) == (200, {"perdure-planted": 1})
        loop = inside(rt).engine_loop
        monkeypatch.setattr(loop, "_round", Once())
        with suppress(perdure.PerdureError):
            rt.generate("Hello", max_tokens=2)
        answer = client.get("/ready")
        assert answer.status_code == 503
        assert "the engine is failed" in answer.text
    assert FAILURES["perdure-engine"] == 1


# One planted in each.


@pytest.mark.extension("cluster")
def test_the_lists_of_a_shared_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Y7: the thread survives anything and says so."""
    from perdure.ext.cluster.places import DirectoryPlace
    from perdure.ext.cluster.shared import SharedTier

    pytest.importorskip("cryptography", reason="cryptography is not installed")
    place = DirectoryPlace(tmp_path)
    planted = Once(place.names)
    monkeypatch.setattr(place, "names", planted)
    with closing(SharedTier(place, key=b"k" * 32, identity=b"i", budget=1 << 20)):
        planted.wait()
    assert FAILURES["perdure-shared-lists"] == 1


def test_writing_behind() -> None:
    tier, blocks = ShelfTier(), chain(range(1, 10))
    with closing(WriteBehind(tier)) as behind:
        tier.error = Panic("planted")  # type: ignore[assignment]
        behind.store(blocks)
        behind.flush()
        assert "planted" in str(behind.error)
        tier.error = None
        behind.store(blocks)
        behind.flush()
        assert behind.error is None
        assert same(behind.load(blocks[0].id), blocks[0])


def test_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Once(dict)
    monkeypatch.setattr(
        ModelPool,
        "models",
        property(lambda pool: SimpleNamespace(values=planted), lambda pool, value: None),
        raising=False,
    )
    with closing(ModelPool()):
        planted.wait()
    assert FAILURES["perdure-pool"] == 1


def test_prefetching_goes_on_with_what_is_due_next() -> None:
    with open_toy(slots=1) as rt:
        prefetcher = Prefetcher(rt.backend)
        planted = Once()
        prefetcher.then(planted)
        prefetcher.then(planted)
        planted.wait()
        prefetcher.wait()


def test_an_observer_that_fails_gets_the_next_event() -> None:
    planted = Once()
    hub = EventHub()
    hub.call(planted)
    for number in range(2):
        hub.emit(Restarted, "", "planted", number)
        if not number:
            until(lambda: FAILURES)
    planted.wait()
    hub.close()
    assert FAILURES["perdure-observer"] == 1


@pytest.mark.extension("cluster")
def test_the_keys_of_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    from perdure.ext.cluster import shared_keys

    monkeypatch.setattr(shared_keys, "_PERIOD", 0.001)
    accounts = SimpleNamespace(is_closed=False, lines=list)
    keys = Keys()
    store = shared_keys.SharedKeyStore(accounts)  # type: ignore[arg-type]
    store.share(keys, lambda: None)
    planted = Once(list)
    accounts.lines = planted
    planted.wait()
    accounts.is_closed = True
    assert FAILURES["perdure-keys"] == 1


def test_the_listener_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "socket")
    planted = Once(lambda end: False)
    monkeypatch.setattr(processes, "is_own_peer", planted)
    holder = StoreOwner(pid=os.getpid(), command="test", since=0.0, socket=address)
    with open_toy(slots=1) as rt, closing(Listener(holder, rt.backend, {})):
        for _ in range(2):
            with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as end:
                end.connect(address)
                until(lambda: FAILURES)
        planted.wait()
    assert FAILURES["perdure-listener"] == 1


def test_a_helper_that_fails_is_idle_again() -> None:
    idle = parallel.idle_helpers(os.getpid())
    count, planted = len(idle), Once()
    if not count or parallel.threads() < 2:
        pytest.skip("no helpers on this machine")
    parallel.assist(planted, 1)
    until(lambda: FAILURES and len(idle) == count)
    parallel.assist(planted, 1)
    planted.wait()
    assert FAILURES["perdure-assist"] == 1


@pytest.mark.skipif(not system.POSIX, reason="Windows has no such signals")
def test_the_thread_that_waits_for_ctrl_c() -> None:
    planted = Once()
    for number in range(2):
        with suppress(KeyboardInterrupt), stopped_by_ctrl_c(planted):
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                while not (planted.again.is_set() if number else FAILURES):
                    os.sched_yield()
    assert FAILURES["perdure-ctrl-c"] == 1


def test_a_check_that_fails_finds_nothing_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Index(tmp_path / "index.sqlite", readonly=False)):
        pass
    with closing(Index(tmp_path / "index.sqlite", readonly=False)) as index:
        monkeypatch.setattr(index, "check", Once())
        with (
            closing(TableCheck(index, ["block"])) as check,
            pytest.raises(StoreError, match="not be checked"),
        ):
            check.wait()
    assert FAILURES["perdure-check"] == 1


def test_a_timer_that_fails_says_so() -> None:
    timer = BackgroundTimer(0.0, Once(), name="perdure-planted")
    timer.start()
    timer.join(PATIENCE)
    assert FAILURES == {"perdure-planted": 1}
    never = BackgroundTimer(PATIENCE, Once(), name="perdure-never")
    never.start()
    never.cancel()
    never.join(PATIENCE)
    assert FAILURES == {"perdure-planted": 1}


def test_the_watch_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Once()
    monkeypatch.setattr(LoopWatch, "_watch", lambda *_: planted())

    async def watched() -> None:
        with LoopWatch(asyncio.get_running_loop()).watching():
            await asyncio.to_thread(planted.wait)

    asyncio.run(watched())
    assert FAILURES["perdure-loop-watch"] == 1


def test_a_service_that_fails_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    service = SimpleNamespace(start=Once(), save=lambda runtime: None)
    monkeypatch.setattr(server_state, "services", lambda: (service,))
    with open_toy(slots=1) as rt, live_server(rt, warm=64) as server, server.client() as client:
        assert client.post("/v1/chat/completions", json=hello(max_tokens=1)).status_code == 200
        until(lambda: FAILURES)
        assert client.get("/ready").json()["failed_threads"] == {"perdure-warm": 1}
        assert client.post("/v1/chat/completions", json=hello(max_tokens=1)).status_code == 200


def test_a_report_that_fails_is_written_after_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that it asks may be gone for a moment."""
    monkeypatch.setattr(metrics, "_SAVED_AFTER", 0.0)
    planted = Once(dict)
    reports = DailyReports(tmp_path / "report", written=planted)
    request = RecentRequest(
        number=1,
        ended=0.0,
        session=None,
        finish_reason="stop",
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        reuse=ReuseReport(tiers={}, computed=1, why=""),
        timings=Timings(queued=0.0, prefill=1.0, decode=0.0, prefilled_tokens=1, decoded_tokens=1),
    )
    reports.add("", request)
    until(lambda: FAILURES)
    reports.add("", request)
    planted.wait()
    until((tmp_path / "report").exists)
    assert FAILURES == {"perdure-report": 1}


def test_the_usage_of_keys_is_written_after_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "SAVED_AFTER", 0.0)
    planted = Once(atomic_write)
    monkeypatch.setattr(keys_module, "atomic_write", lambda *values, **options: planted(*values))
    usage, key = KeyUsage(tmp_path / "usage"), new_key("ada")[1]
    usage.spend(key, 0.0, prompt=1)
    until(lambda: FAILURES)
    usage.spend(key, 0.0, prompt=1)
    planted.wait()
    until((tmp_path / "usage").exists)
    assert FAILURES == {"perdure-usage": 1}


def test_what_is_written_behind_a_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Once()
    monkeypatch.setattr(pending_turn, "_SECONDS", 0.001)
    monkeypatch.setattr(PendingTurns, "_look", lambda *_, **__: planted())
    with perdure.open(ToyModel(faults=Faults(pace=0.01)), store=tmp_path, n_ctx=512, slots=1) as rt:
        stream = rt.session("s").submit("Hello", max_tokens=400, ignore_eos=True)
        planted.wait()
        stream.cancel()
        stream.reply()
    assert FAILURES["perdure-pending"] == 1
