"""The cluster as an application of Ray Serve, on its own request-router interface (alpha in Ray 2.60).

    clients ─ Ray's HTTP proxy ─ Gateway ─ SessionRouter ─ ReplicaActor …
              (one a machine)    reads      (policy.py)     one engine each
                                 the body

`Gateway` is there because a router sees the arguments of a call, and Ray's proxy gives it an HTTP request
whose body has not been read. It computes nothing and keeps nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from perdure.ext.cluster.ray.config import ClusterConfig
from perdure.ext.cluster.ray.marks import ask_of
from perdure.ext.cluster.ray.policy import (
    ReplicaFacts,
    RoutedRequest,
    RouterMemory,
    ranked,
    wanted_replicas,
    warm_tokens,
)
from perdure.ext.cluster.ray.replica import (
    Head,
    OpenRuntime,
    OwnFolder,
    Replica,
    ReplicaCall,
    open_replica,
    usual_runtime,
)

NAME = "perdure"
"""Of the application."""
_READING = ("GET", "HEAD")
_LOST = "the replica that was to answer is gone"


class SessionRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that has its first token soonest (`policy.py`)."""

    def initialize_state(self, facts_seconds: float = 1.0) -> None:
        self._memory = RouterMemory()
        self._trust = 2 * facts_seconds
        self._reports: dict[ReplicaID, tuple[Mapping[str, Any], ReplicaFacts, float]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {each.replica_id.to_full_id_str(): each for each in candidate_replicas}
        facts = self._facts(by_name)
        order = ranked(_ask_in(pending_request), self._seen(pending_request, facts))
        if pending_request is not None:
            # All replicas are in the answer: Ray waits a moment before it asks again.
            pending_request.routing_context.should_backoff = True
        return [[by_name[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        ask = _ask_in(pending_request)
        known = max((warm_tokens(ask, facts) for _, facts, _ in self._reports.values()), default=0)
        self._memory.sent(ask, replica_id.to_full_id_str(), known, time.monotonic())

    def _seen(
        self, pending_request: PendingRequest | None, facts: dict[str, ReplicaFacts]
    ) -> dict[str, ReplicaFacts]:
        reported_at = {each.to_full_id_str(): at for each, (_, _, at) in self._reports.items()}
        return self._memory.seen(_ask_in(pending_request), facts, reported_at, trust=self._trust)

    def _facts(self, replicas: Mapping[str, RunningReplica]) -> dict[str, ReplicaFacts]:
        """The latest facts of the replicas, with the queue lengths that Ray knows by now."""
        facts, now = {}, time.monotonic()
        for name, each in replicas.items():
            before = self._reports.get(each.replica_id)
            if before is None or before[0] is not each.routing_stats:
                before = each.routing_stats, ReplicaFacts.from_json(each.routing_stats), now
                self._reports[each.replica_id] = before
            queue = self.replica_queue_len_cache.get(each.replica_id)
            facts[name] = before[1] if queue is None else replace(before[1], queue=queue)
        if len(self._reports) > len(replicas):
            alive = {each.replica_id for each in replicas.values()}
            self._reports = {each: entry for each, entry in self._reports.items() if each in alive}
        return facts


class ReplicaActor:
    """One replica as an actor of Ray. Ray sends it nothing more before it ends it, and waits for its replies;
    then `__del__` writes its state where the others find it."""

    def __init__(self, config: ClusterConfig, open_runtime: OpenRuntime) -> None:
        self._folder = OwnFolder(config.store, config.folder)
        self._replica: Replica | None = open_replica(config, self._folder.store, open_runtime)

    async def answer(self, call: ReplicaCall) -> AsyncIterator[Head | bytes]:
        assert self._replica is not None
        answer = self._replica.answer(call)
        try:
            async for piece in answer:
                yield piece
        finally:
            await answer.aclose()  # type: ignore[attr-defined]

    def record_routing_stats(self) -> dict[str, Any]:
        return {} if self._replica is None else self._replica.facts().to_json()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"full": 0.0 if self._replica is None else self._replica.facts().full}

    def check_health(self) -> None:
        if self._replica is not None and self._replica.state.models.first.engine()[0] == "failed":
            raise RuntimeError("the engine does not start again")

    async def __del__(self) -> None:
        taken, self._replica = getattr(self, "_replica", None), None
        if taken is not None:
            await asyncio.to_thread(taken.close)
            self._folder.release()


class Gateway:
    """Reads a request, so that the router sees what it is about, and passes the answer on as it comes."""

    def __init__(self, replicas: DeploymentHandle, body_bytes: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._body_bytes = body_bytes

    async def __call__(self, request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._body_bytes:
                return _error(413, f"a request has at most {self._body_bytes} bytes", "request_too_large")
        headers = tuple((bytes(name), bytes(value)) for name, value in request.headers.raw)
        # A large body takes a while to read: others are answered meanwhile.
        ask = await asyncio.to_thread(ask_of, request.url.path, headers, bytes(body))
        call = ReplicaCall(
            method=request.method,
            path=request.url.path,
            query=request.url.query.encode(),
            headers=headers,
            body=bytes(body),
            ask=ask,
            client=tuple(request.client) if request.client else None,  # type: ignore[arg-type]
        )
        # What only reads may be asked twice. What may have been answered is not.
        for attempt in range(3 if request.method in _READING else 1):
            if attempt:
                await asyncio.sleep(0.1 * attempt)
            pieces = self._replicas.answer.remote(call)
            try:
                head = await anext(aiter(pieces))
            except (RayActorError, DeploymentUnavailableError, BackPressureError, StopAsyncIteration):
                continue
            assert isinstance(head, Head)
            answer = StreamingResponse(_rest(pieces), status_code=head.status)
            answer.raw_headers = [*head.headers]
            return answer
        return _error(
            503, f"{_LOST}: look whether your turn was kept, and ask again", "replica_lost", retry_after=1
        )


async def _rest(pieces: Any) -> AsyncIterator[bytes]:
    """The body of an answer. Where its replica dies the connection breaks, as it does without Ray."""
    try:
        async for piece in pieces:
            yield piece
    finally:
        pieces.cancel()


def _error(status: int, why: str, code: str, *, retry_after: int | None = None) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": why, "type": kind, "param": None, "code": code}}
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _ask_in(request: PendingRequest | None) -> RoutedRequest:
    call = request.args[0] if request is not None and request.args else None
    return call.ask if isinstance(call, ReplicaCall) else RoutedRequest()


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """How many replicas there should be: by requests and by memory."""
    full = (context.aggregated_metrics or {}).get("full", {})
    target = context.config.get_target_ongoing_requests() if context.config is not None else 1
    replica_count = wanted_replicas(
        [ReplicaFacts(full=each) for each in full.values()],
        requests=context.total_num_requests,
        target=target,
    )
    return replica_count, {}


def build(config: ClusterConfig, *, open_runtime: OpenRuntime = usual_runtime) -> serve.Application:
    """The application for `serve.run`."""
    sizes = config.replicas
    scaled: dict[str, Any] = {"num_replicas": sizes.min}
    if sizes.max > sizes.min:
        scaled = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=sizes.min,
                max_replicas=sizes.max,
                target_ongoing_requests=sizes.requests,
                upscale_delay_s=sizes.up_seconds,
                downscale_delay_s=sizes.down_seconds,
                # Longer than the 10 s between two reports of a replica.
                look_back_period_s=15,
                policy=AutoscalingPolicy(policy_function=scale),
            )
        }
    resources: dict[str, Any] = {"num_cpus": sizes.cpus, "num_gpus": sizes.gpus}
    if sizes.memory:
        resources["memory"] = sizes.memory
    replicas = serve.deployment(
        ReplicaActor,
        name="Replica",
        max_ongoing_requests=sizes.queue,
        ray_actor_options=resources,
        graceful_shutdown_timeout_s=sizes.grace_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        request_router_config=RequestRouterConfig(
            request_router_class=SessionRouter,
            request_router_kwargs={"facts_seconds": sizes.facts_seconds},
            request_routing_stats_period_s=sizes.facts_seconds,
        ),
        **scaled,
    )
    gateway = serve.deployment(
        Gateway, name="Gateway", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.1}
    )
    return gateway.bind(replicas.bind(config, open_runtime), config.body_bytes)


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """The application for Ray's own config files: their `import_path` is
    `perdure.ext.cluster.ray.application:application`, their `args` `{config: /etc/perdure/cluster.toml}`."""
    return build(ClusterConfig.read(Path(str(arguments["config"]))))
