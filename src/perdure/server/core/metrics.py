"""What a server counts: metrics for Prometheus, and a ledger of usage behind them, keys and reports."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perdure import system
from perdure.atomic import atomic_write, read_file
from perdure.chat.difference import Miss
from perdure.chat.reply import ChatReply
from perdure.decode.request import Reply, ReuseReport, Timings, Usage
from perdure.errors import ClosedError, PerdureError
from perdure.events.background import BackgroundTimer

if TYPE_CHECKING:
    from starlette.types import Scope

    from perdure.runtime import Runtime
    from perdure.server.core.visit import Caller

log = logging.getLogger("perdure.server")


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SPEEDS = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """What came of one stream of a request."""

    caller: Caller
    model: str
    """What it is called in answers."""
    session: str | None
    replies: Sequence[Reply | ChatReply]
    """Empty where the client left, or the stream failed, before they were there."""
    usage: Usage
    """What was read and written."""
    began: float
    """When it was submitted, in seconds since 1970."""
    streamed: bool


class RequestObserver(Protocol):
    """Follows the requests of a server, such as to export them. Each call comes in the event loop; none may
    wait or raise."""

    def began(self, scope: Scope) -> Any:
        """A request has come, or a WebSocket. What it returns is given to `ended`."""
        ...

    def replied(self, end: StreamEnd) -> None:
        """A stream has ended. Called in a context (`contextvars`) that comes from that of `began`."""
        ...

    def ended(self, request: Any, fields: Mapping[str, Any]) -> None:
        """The answer to a request is sent; `fields` are those of its line in the log."""
        ...


class Metrics:
    """Counts of one server. What the engine itself knows is read when metrics are read."""

    observer: RequestObserver | None = None
    """Hears of all that is counted here."""

    def __init__(self, runtimes: Callable[[], Sequence[Runtime]], folder: Path | None = None) -> None:
        """`runtimes` gives those whose engines are known at the moment; `folder` is that of the store."""
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._requests = counter(
            "perdure_requests",
            "Requests by route and status; 499 is a client that left",
            ("method", "route", "status"),
        )
        self._durations = histogram(
            "perdure_request_seconds",
            "Seconds from the headers of a request to the end of its answer",
            ("route",),
            buckets=_SECONDS,
        )
        self._first = histogram(
            "perdure_first_token_seconds", "Seconds from submission to the first token", buckets=_SECONDS
        )
        self._speed = histogram(
            "perdure_tokens_per_second", "Tokens a second of a reply, after its first", buckets=_SPEEDS
        )
        self._tokens = counter("perdure_tokens", "Tokens by what they were", ("kind",))
        self._key_tokens = counter(
            "perdure_key_tokens",
            "Tokens by the namespace of their key, and by what they were",
            ("namespace", "kind"),
        )
        self._key_replies = counter(
            "perdure_key_replies", "Replies by the namespace of their key", ("namespace",)
        )
        self._not_kept = counter(
            "perdure_turns_not_kept", "Turns that the store refused: the disk is full, or cannot be written"
        )
        self._reused = counter(
            "perdure_reused_tokens", "Prompt tokens that were not computed, by tier", ("tier",)
        )
        self._warmed = counter(
            "perdure_warmed_tokens",
            "Tokens of known clients' prompts that were woken after the start, or computed again",
            ("source",),
        )
        self._finished = counter("perdure_replies", "Replies by how they ended", ("finish_reason",))
        self.registry.register(_Engine(runtimes))
        if folder is not None:
            self.registry.register(_Disk(folder))

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._durations.labels(route).observe(seconds)

    def reply(self, reply: Reply | ChatReply, namespace: str = "") -> None:
        """Count a reply. Labels are bounded by the namespaces in the file of keys."""
        usage, timings = reply.usage, reply.timings
        if getattr(reply, "could_not_be_kept", False):
            self._not_kept.inc()
        if namespace:
            self._key_replies.labels(namespace).inc()
            self._key_tokens.labels(namespace, "prompt").inc(usage.prompt_tokens)
            self._key_tokens.labels(namespace, "cached").inc(usage.cached_tokens)
            self._key_tokens.labels(namespace, "written").inc(usage.completion_tokens)
        if timings.decoded_tokens:
            self._first.observe(timings.queued + timings.prefill)
        if timings.decode_speed:
            self._speed.observe(timings.decode_speed)
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("written").inc(usage.completion_tokens)
        self._tokens.labels("forced").inc(timings.forced_tokens)
        self._tokens.labels("drafted").inc(timings.drafted_tokens)
        self._tokens.labels("accepted").inc(timings.accepted_tokens)
        for tier, count in reply.reuse.tiers.items():
            self._reused.labels(tier).inc(count)
        self._finished.labels(reply.finish_reason).inc()

    def warmed(self, reuse: ReuseReport) -> None:
        """Count what was read of a beginning after the start."""
        self._warmed.labels("woken").inc(reuse.reused)
        self._warmed.labels("computed").inc(reuse.computed)

    def embedded(self, tokens: int) -> None:
        self._tokens.labels("embedded").inc(tokens)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. It may wait for the engine."""
        return generate_latest(self.registry)


class _Disk(Collector):
    """The disk on which the store is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            disk = shutil.disk_usage(self._folder)
        except OSError:
            return
        for name, what, value in (
            ("perdure_disk_bytes", "Size of the disk on which the store is", disk.total),
            ("perdure_disk_free_bytes", "Of it, what is free for the server", disk.free),
        ):
            yield GaugeMetricFamily(name, what, value=value)


class _Engine(Collector):
    """What runtimes say of themselves at the moment, together; where an engine is down, less."""

    def __init__(self, runtimes: Callable[[], Sequence[Runtime]]) -> None:
        self._runtimes = runtimes

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        runtimes = self._runtimes()
        healths = [getattr(runtime.backend, "health", lambda: None)() for runtime in runtimes]
        yield CounterMetricFamily(
            "perdure_engine_restarts",
            "How often the engine was started anew",
            value=sum(health.restarts for health in healths if health is not None),
        )
        yield GaugeMetricFamily(
            "perdure_slots",
            "Requests that can be served at once",
            value=sum(runtime.slots for runtime in runtimes),
        )
        memory = GaugeMetricFamily(
            "perdure_resident_bytes", "Memory of the processes, mapped files included", labels=["process"]
        )
        engines = [health.rss for health in healths if health is not None and health.rss is not None]
        for name, nbytes in (
            ("server", system.resident_memory(os.getpid())),
            ("engine", sum(engines) if engines else None),
        ):
            if nbytes is not None:
                memory.add_metric([name], nbytes)
        yield memory
        waiting = served = 0
        stats = []
        for runtime, health in zip(runtimes, healths, strict=True):
            try:
                # A call would wait for an engine that is being started, or start one that was let go.
                if health is not None and health.state != "ready":
                    raise ClosedError(f"the engine is {health.state}")
                load = runtime.load
                stats.append(runtime.cache.stats())
            except PerdureError:
                continue
            waiting, served = waiting + load[0], served + load[1]
        yield GaugeMetricFamily("perdure_engine_up", "Whether an engine answers", value=int(bool(stats)))
        if not stats:
            return
        yield GaugeMetricFamily("perdure_queue_length", "Requests that wait for a slot", value=waiting)
        yield GaugeMetricFamily("perdure_slots_busy", "Requests that are being served", value=served)
        # The names that gateways read: the model server protocol of the Gateway API inference extension, as
        # vLLM has them.
        for name, what, value in (
            ("vllm:num_requests_waiting", "Requests that wait for a slot", float(waiting)),
            ("vllm:num_requests_running", "Requests that are being served", float(served)),
            (
                "vllm:kv_cache_usage_perc",
                "Part of the slots that is in use, from 0 to 1",
                served / max(1, sum(runtime.slots for runtime in runtimes)),
            ),
        ):
            yield GaugeMetricFamily(name, what, value=value)
        kept_bytes = GaugeMetricFamily("perdure_kept_bytes", "State that is kept, by tier", labels=["tier"])
        kept_bytes.add_metric(["memory"], sum(each.nbytes for each in stats))
        tiers: dict[str, int] = {}
        for each in stats:
            for tier, nbytes in each.tier_bytes.items():
                tiers[tier] = tiers.get(tier, 0) + nbytes
        for tier, nbytes in tiers.items():
            kept_bytes.add_metric([tier], nbytes)
        yield kept_bytes
        yield CounterMetricFamily(
            "perdure_computed_tokens",
            "Prompt tokens that had to be computed",
            value=sum(each.computed_tokens for each in stats),
        )
        yield CounterMetricFamily(
            "perdure_evicted_blocks", "Blocks that had to go", value=sum(each.evicted for each in stats)
        )
        evicted = CounterMetricFamily(
            "perdure_evicted_as", "Blocks that had to go, by what they were", labels=["standing"]
        )
        for standing in ("superseded", "side", "conversation", "shared", "kept"):
            evicted.add_metric([standing], sum(each.evicted_as.get(standing, 0) for each in stats))
        yield evicted


def written_bytes(runtimes: Iterable[Runtime]) -> dict[int, int]:
    """What each engine that answers has written to its tiers since it started."""
    written = {}
    for runtime in runtimes:
        health = getattr(runtime.backend, "health", lambda: None)()
        # A call would wait for an engine that is being started, or start one that was let go.
        if health is None or health.state == "ready":
            with suppress(PerdureError):
                written[id(runtime)] = sum(runtime.cache.stats().written_bytes.values())
    return written


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


# The last requests, for an operator who wants to see what was reused and why not more.

_KEPT = 200
"""Of each namespace."""
_NAMESPACES = 256
_CLIENTS = 16
"""That a report lists separately, for each cause."""
_WEEK = 7
"""Days that a report goes back."""
_DAY = 86_400
_SAVED_AFTER = 5.0
"""Seconds after a request until its day is written."""
_FILE_BYTES = 64 << 20
"""A file larger than that was not written here."""
REPORT = "report.json"
"""In the folder of a store: the days of reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRequest:
    """How one request was answered. Of what was said only a line is in it: the first that differed."""

    number: int
    ended: float
    session: str | None
    finish_reason: str
    usage: Usage
    reuse: ReuseReport
    timings: Timings
    agent: str = ""
    """The program that asked."""
    miss: Miss | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """Sums over requests: what the cache saved, and what was computed again by cause and client."""

    since: float = field(default_factory=time.time)
    requests: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    prefill_seconds: float = 0.0
    saved_seconds: float = 0.0
    """That the reused tokens would have taken at the speed of those that were computed."""
    misses: dict[str, dict[str, int]] = field(default_factory=dict)
    """Tokens computed again, by cause and then by client."""

    def add(self, request: RecentRequest) -> None:
        reuse, timings = request.reuse, request.timings
        self.requests += 1
        self.reused_tokens += reuse.reused
        self.computed_tokens += reuse.computed
        self.prefill_seconds += timings.prefill
        if reuse.computed:
            self.saved_seconds += timings.prefill * reuse.reused / reuse.computed
        if request.miss is not None:
            by_client = self.misses.setdefault(request.miss.cause, {})
            # Clients name themselves: those beyond a number are counted together.
            client = request.agent or "unknown"
            client = client if client in by_client or len(by_client) < _CLIENTS else "others"
            by_client[client] = by_client.get(client, 0) + request.miss.tokens

    def copy(self) -> Report:
        return replace(self, misses={cause: dict(tokens) for cause, tokens in self.misses.items()})

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Report:
        """One that was stored. What is wrong with it is a `ValueError`, `TypeError` or `KeyError`."""
        misses = {
            str(cause): {str(client): int(tokens) for client, tokens in dict(clients).items()}
            for cause, clients in dict(stored["misses"]).items()
        }
        return cls(
            since=float(stored["since"]),
            requests=int(stored["requests"]),
            reused_tokens=int(stored["reused_tokens"]),
            computed_tokens=int(stored["computed_tokens"]),
            prefill_seconds=float(stored["prefill_seconds"]),
            saved_seconds=float(stored["saved_seconds"]),
            misses=misses,
        )


class DailyReports:
    """Reports of the last seven days of UTC, by namespace, and what was written to the tiers on each. Safe
    from any thread.

    With a file they outlast the server: it is written some seconds after a request, and at `save`. A file
    that is damaged or gone costs the days before, and no more.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        written: Callable[[], Mapping[int, int]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`written` returns the bytes that each engine has written since it started; it may wait."""
        self._path = path
        self._ask_written = written
        self._clock = clock
        self._lock = threading.Lock()
        self._days: dict[int, dict[str, Report]] = {}
        self._written: dict[int, int] = {}
        self._last_written: dict[int, int] = {}
        """What each engine had written when it was asked last."""
        self._timer: BackgroundTimer | None = None
        self._read()

    def add(self, namespace: str, request: RecentRequest) -> None:
        with self._lock:
            reports = self._days.setdefault(self._today(), {})
            if namespace in reports or len(reports) < _NAMESPACES:
                reports.setdefault(namespace, Report(since=self._clock())).add(request)
            if self._path is not None and self._timer is None:
                self._timer = BackgroundTimer(_SAVED_AFTER, self.save, name="perdure-report")
                self._timer.start()

    def week(self, namespace: str) -> list[tuple[str, Report, int]]:
        """The last seven days, the first one first: the date, the report of a namespace, and the bytes that
        were written for all. It may wait for an engine."""
        self._count_written()
        with self._lock:
            today = self._today()
            return [
                (
                    datetime.fromtimestamp(day * _DAY, UTC).date().isoformat(),
                    self._days.get(day, {}).get(namespace, Report(since=day * _DAY)).copy(),
                    self._written.get(day, 0),
                )
                for day in range(today - _WEEK + 1, today + 1)
            ]

    def save(self) -> None:
        """Write what there is to the file. A disk that is full loses no more than this."""
        if self._path is None:
            return
        with self._lock:
            # Before anything that may fail: the next request is to start another one.
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._count_written()
        with self._lock:
            days = {
                str(day): {namespace: asdict(report) for namespace, report in reports.items()}
                for day, reports in self._days.items()
            }
            table = {"days": days, "written": {str(day): nbytes for day, nbytes in self._written.items()}}
        try:
            with atomic_write(self._path, private=True, durable=False) as file:
                file.write(json.dumps(table).encode())
        except OSError as error:
            log.warning("the report cannot be written to %s: %s", self._path, error.strerror)

    def _today(self) -> int:
        """The day, with the lock held. Those that are too long ago go."""
        today = int(self._clock() // _DAY)
        for table in (self._days, self._written):
            for old in [day for day in table if not today - _WEEK < day <= today]:
                del table[old]
        return today

    def _count_written(self) -> None:
        written = dict(self._ask_written())
        with self._lock:
            today = self._today()
            for engine, nbytes in written.items():
                before = self._last_written.get(engine, 0)
                # One that was started anew counts from the beginning.
                more = nbytes - before if nbytes >= before else nbytes
                self._written[today] = self._written.get(today, 0) + more
            self._last_written.update(written)

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            table = json.loads(read_file(self._path, _FILE_BYTES))
            self._days = {
                int(day): {
                    str(namespace): Report.from_json(report)
                    for namespace, report in list(dict(reports).items())[:_NAMESPACES]
                }
                for day, reports in dict(table["days"]).items()
            }
            self._written = {int(day): int(nbytes) for day, nbytes in dict(table["written"]).items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self._days, self._written = {}, {}
            log.warning("%s is not read: %s", self._path, error)


class UsageLedger:
    """What was computed, for whom: each stream is an entry, and metrics, what a key has used, the latest
    requests of a namespace and the reports of its days follow from it. Safe from any thread.

    Numbers of requests count up within a namespace, so that they tell nobody what others ask.
    """

    def __init__(
        self, runtimes: Callable[[], Sequence[Runtime]] = tuple, *, folder: Path | None = None
    ) -> None:
        """`runtimes` gives those whose engines are known at the moment. In `folder`, reports outlast it."""
        self.metrics = Metrics(runtimes, folder)
        path = None if folder is None else folder / REPORT
        self.daily = DailyReports(path, written=lambda: written_bytes(runtimes()))
        self.not_kept = 0
        """Turns that the store refused, since the server started."""
        self._lock = threading.Lock()
        self._of: dict[str, deque[RecentRequest]] = {}
        self._numbers: dict[str, itertools.count[int]] = {}
        self._totals: dict[str, Report] = {}

    def record(
        self,
        replies: Sequence[Reply] | Sequence[ChatReply],
        caller: Caller,
        session: str | None = None,
        *,
        listed: bool = True,
    ) -> None:
        """Count what came of a stream. Of several in one request, one is `listed` in the latest requests."""
        for reply in replies:
            self.metrics.reply(reply, caller.namespace)
            if isinstance(reply, ChatReply) and reply.could_not_be_kept:
                self.not_kept += 1
                log.warning(
                    "a turn of session %r in namespace %r could not be kept: %s",
                    session,
                    caller.namespace,
                    reply.not_kept,
                )
        first, notes = replies[0], caller.notes
        miss = first.miss if isinstance(first, ChatReply) else None
        if listed:
            self._list(first, miss, caller.namespace, session or caller.session, caller.agent)
        notes["reuse"] = _reuse_text(first.reuse, miss)
        cached = sum(reply.usage.cached_tokens for reply in replies if reply.index == 0)
        notes["cached_tokens"] = notes.get("cached_tokens", 0) + cached
        notes["finish_reason"] = first.finish_reason
        if caller.account is not None:
            caller.account.reply(cached)

    def _list(
        self, reply: Reply | ChatReply, miss: Miss | None, namespace: str, session: str | None, agent: str
    ) -> None:
        with self._lock:
            # The one that asked last stands last: the first goes when there are too many.
            recent = self._of.pop(namespace, None) or deque(maxlen=_KEPT)
            self._of[namespace] = recent
            recent.append(
                RecentRequest(
                    number=next(self._numbers.setdefault(namespace, itertools.count(1))),
                    ended=time.time(),
                    session=session,
                    finish_reason=reply.finish_reason,
                    usage=reply.usage,
                    reuse=reply.reuse,
                    timings=reply.timings,
                    agent=agent,
                    miss=miss,
                )
            )
            self._totals.setdefault(namespace, Report()).add(recent[-1])
            self.daily.add(namespace, recent[-1])
            if len(self._of) > _NAMESPACES:
                oldest = next(iter(self._of))
                del self._of[oldest], self._numbers[oldest], self._totals[oldest]

    def report(self, namespace: str) -> Report:
        """What was reused and what was computed again, since the start of the server."""
        with self._lock:
            return self._totals.get(namespace, Report()).copy()

    def latest(self, namespace: str, *, limit: int, before: int | None = None) -> list[RecentRequest]:
        """The latest first: up to `limit`, of those that came before number `before`."""
        with self._lock:
            recent = list(self._of.get(namespace, ()))
        return [each for each in reversed(recent) if before is None or each.number < before][:limit]


def _reuse_text(reuse: ReuseReport, miss: Miss | None) -> str:
    """What was reused, for a header: `slot=812, computed=33; tools: read_file is new`. No text of a
    conversation is in it."""
    counts = [f"{tier}={count}" for tier, count in reuse.tiers.items()]
    text = ", ".join([*counts, f"computed={reuse.computed}"])
    return f"{text}; {miss.why}" if miss is not None else text
