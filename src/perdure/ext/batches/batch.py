"""Batches of one namespace: what is asked, how far it is, and the answers.

batches:batch   batch_7f…         the request, its status and times
batches:answer  batch_7f…-000017  the answer to line 17, written once
batches:cancel  batch_7f…         its client wants no more answers

validating → in_progress → finalizing → completed, cancelled or expired
         ↘ failed      ↘ failed
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from perdure import PerdureError, SessionExistsError, SessionNotFoundError
from perdure.ext.batches.files import ANSWER, KEPT, MOST_FILES, Files, answer_name, names
from perdure.spi.server import ApiError, JsonScan, Limits
from perdure.spi.sessions import Record, SessionStore

BATCH, CANCEL = "batches:batch", "batches:cancel"
ENDPOINTS = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings")
WINDOW = 86400
"""Seconds in which a batch is answered, or expires."""
MOST_LINES = 50_000
_TOLD = 100
"""Errors of lines that are told, at most."""
RUNNING = ("validating", "in_progress", "finalizing")


class Batches:
    """Every call may wait for the disk."""

    def __init__(self, store: SessionStore, namespace: str) -> None:
        self._store = store
        self._namespace = namespace
        self.files = Files(store, namespace)

    def create(self, endpoint: str, file_id: str, metadata: Mapping[str, str], key: str | None) -> Record:
        """A new batch. `key` is the digest of the key that pays for it."""
        self.files.get(file_id)
        if len(names(self._store, BATCH, self._namespace)) >= MOST_FILES:
            raise ApiError(507, f"{MOST_FILES} batches are kept, which is the limit", code="too_many_batches")
        now = int(time.time())
        about = {
            "endpoint": endpoint,
            "input_file_id": file_id,
            "metadata": dict(metadata),
            "key": key,
            "status": "validating",
            "created_at": now,
            "expires_at": now + WINDOW,
            "counts": {"total": 0, "completed": 0, "failed": 0},
        }
        return self._store.put(self._namespace, BATCH, f"batch_{uuid.uuid4().hex}", about)

    def get(self, batch_id: str) -> Record:
        with suppress(SessionNotFoundError):
            return self._store.record(self._namespace, BATCH, batch_id)
        raise ApiError(404, f"there is no batch {batch_id[:100]!r}", code="batch_not_found")

    def all(self) -> list[Record]:
        """The latest first."""
        found = []
        for name in names(self._store, BATCH, self._namespace):
            with suppress(ApiError):
                found.append(self.get(name))
        return sorted(found, key=lambda each: each.number, reverse=True)

    def reading(self, file_id: str) -> Record | None:
        """A batch that is being answered out of that file."""
        running = (each for each in self.all() if each.origin["status"] in RUNNING)
        return next((each for each in running if each.origin["input_file_id"] == file_id), None)

    def cancel(self, batch: Record) -> None:
        if batch.origin["status"] not in RUNNING:
            raise ApiError(
                409, f"batch {batch.name} is {batch.origin['status']} already", code="batch_not_running"
            )
        with suppress(SessionExistsError):
            self._store.put(self._namespace, CANCEL, batch.name, {})

    def is_cancelled(self, batch: Record) -> bool:
        with suppress(SessionNotFoundError):
            return bool(self._store.record(self._namespace, CANCEL, batch.name))
        return False

    def shown(self, batch: Record) -> dict[str, Any]:
        """As OpenAI's object."""
        about = dict(batch.origin)
        status = about["status"]
        if status in RUNNING[:2] and self.is_cancelled(batch):
            status = "cancelling"
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": batch.name,
            "object": "batch",
            "endpoint": about["endpoint"],
            "errors": about.get("errors"),
            "input_file_id": about["input_file_id"],
            "completion_window": "24h",
            "status": status,
            "output_file_id": about.get("output_file_id"),
            "error_file_id": about.get("error_file_id"),
            "created_at": about["created_at"],
            "expires_at": about["expires_at"],
            **{f"{each}_at": about.get(f"{each}_at") for each in times},
            "request_counts": about["counts"],
            "metadata": about["metadata"] or None,
        }

    # Answering.

    def note(self, batch: Record, **changes: object) -> Record:
        """Write down how far a batch is."""
        return self._store.note(batch, {**batch.origin, **changes}, bounded=False)

    def begin(self, batch: Record, limits: Limits) -> Record:
        """Look at every line before the first is answered."""
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        lines = 0
        for text in self.files.lines(self.files.get(batch.origin["input_file_id"]), limits.body_bytes):
            lines += 1
            try:
                line = read_line(text, batch.origin["endpoint"], limits)
                if line["custom_id"] in seen:
                    raise _wrong(
                        "duplicate_custom_id", f"custom_id {line['custom_id'][:100]!r} is there twice"
                    )
                seen.add(line["custom_id"])
                if lines > MOST_LINES:
                    raise _wrong("too_many_lines", f"more than {MOST_LINES} lines: send several files")
            except ApiError as error:
                told = {"code": error.code, "message": str(error), "param": error.param, "line": lines}
                errors.append(told)
                if len(errors) >= _TOLD or lines > MOST_LINES:
                    break
        if not lines:
            errors = [{"code": "empty_file", "message": "the file has no line", "param": None, "line": None}]
        if errors:
            return self.fail(batch, errors)
        for ok in (True, False):
            self.files.for_answers(batch.name, ok=ok, lines=lines)
        counts = {"total": lines, "completed": 0, "failed": 0}
        return self.note(batch, status="in_progress", in_progress_at=int(time.time()), counts=counts)

    def fail(self, batch: Record, errors: list[dict[str, Any]]) -> Record:
        shown = {"object": "list", "data": errors}
        return self.note(batch, status="failed", failed_at=int(time.time()), errors=shown)

    def has_answer(self, batch: Record, line: int) -> bool | None:
        """Whether the answer to a line came out right; None where there is none."""
        with suppress(SessionNotFoundError):
            record = self._store.record(self._namespace, ANSWER, answer_name(batch.name, line))
            return bool(record.origin["ok"])
        return None

    def answer(self, batch: Record, line: int, answer: Mapping[str, Any], *, ok: bool) -> None:
        """Keep the answer to a line: the first one."""
        text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        with suppress(SessionExistsError):
            body = {"ok": ok, "line": text}
            self._store.put(self._namespace, ANSWER, answer_name(batch.name, line), body)

    def finish(self, batch: Record, status: str, counts: Mapping[str, int]) -> Record:
        """Have the answers be files, and the batch be over."""
        now = int(time.time())
        batch = self.note(batch, status="finalizing", finalizing_at=now, then=status, counts=dict(counts))
        ids = {}
        for ok, name in ((True, "output_file_id"), (False, "error_file_id")):
            file = self.files.finish(
                self.files.for_answers(batch.name, ok=ok, lines=batch.origin["counts"]["total"])
            )
            ids[name] = None if file is None else file.name
        return self.note(batch, status=status, **{f"{status}_at": int(time.time())}, **ids)

    def delete(self, batch: Record) -> None:
        with suppress(SessionNotFoundError):
            self._store.delete(self._store.record(self._namespace, CANCEL, batch.name))
        self._store.delete(batch)


def sweep(store: SessionStore, now: float) -> None:
    """Delete the batches that were over long ago. Their files go by themselves."""
    for namespace, name in store.expired(now - KEPT, limit=2**31 - 1, kind=BATCH):
        # One that is damaged must not be in the way of the others.
        with suppress(PerdureError):
            Batches(store, namespace).delete(store.record(namespace, BATCH, name))


def read_line(text: str, endpoint: str, limits: Limits) -> dict[str, Any]:
    """What a line asks for, or what is wrong with it."""
    if len(data := text.encode()) > limits.body_bytes:
        raise _wrong("line_too_long", f"the line has more than {limits.body_bytes} bytes, which is the limit")
    scan = JsonScan()
    scan.push(data)
    scan.check(limits)
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong("invalid_json_line", "the line is no JSON") from None
    if not isinstance(line, dict):
        raise _wrong("invalid_json_line", "the line is no JSON object")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 256:
        raise _wrong("missing_required_parameter", "a text of 1 to 256 characters", "custom_id")
    if line.get("method") != "POST":
        raise _wrong("invalid_method", "it is POST", "method")
    if line.get("url") != endpoint:
        raise _wrong("mismatched_url", f"it is {endpoint}, as the batch says", "url")
    if not isinstance(body, dict):
        raise _wrong("missing_required_parameter", "an object", "body")
    for name in ("stream", "background"):
        if body.get(name):
            raise _wrong("invalid_value", "not in a batch: its answers are whole", f"body.{name}")
    return line


def _wrong(code: str, problem: str, param: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {problem}" if param else problem, param=param, code=code)
