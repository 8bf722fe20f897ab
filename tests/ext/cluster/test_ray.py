"""Replicas under Ray Serve, for real: our router inside Ray's, kills, and scaling under load.

Ray is not among what the tests install (`make ray`, which `make soak` runs): without it these are skipped.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import perdure
from ext.cluster.harness import TURNS, Outcome, check, soak_seconds, talking, under_kills
from ext.cluster.servers import PostgresServer, free_port
from perdure.ext.cluster.ray.config import ClusterConfig
from perdure.testing.toy import ToyModel

pytest.importorskip("ray.serve", reason="Ray is not installed: make ray")

pytestmark = [
    pytest.mark.soak,
    # Ray leaves sockets and loops to the garbage collector.
    pytest.mark.filterwarnings("ignore"),
]


def toy(config: ClusterConfig, store: str) -> tuple[perdure.Runtime, str]:
    return perdure.open(ToyModel(), n_ctx=1024, slots=4, store=store, blocks=config.blocks or None), "toy"


def _start(**settings: Any) -> None:
    """Start Ray. It gives its own processes 15 to 30 s: too few on a machine that has other work."""
    import ray

    for left in reversed(range(10)):
        try:
            ray.init(**settings)
            return
        except Exception:
            ray.shutdown()
            # What has started all the same.
            for each in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if any("/ray/" in word for word in each.cmdline()):
                        each.kill()
            if not left:
                raise


@contextmanager
def ray_serve(postgres: PostgresServer, folder: Path, **replicas: Any) -> Iterator[str]:
    """An application of toy replicas; its URL."""
    port = free_port()
    with application(postgres.url(folder / "own", lease=5), folder, port, **replicas):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def application(store: str, folder: Path, port: int, **replicas: Any) -> Iterator[None]:
    """Ray and an application of toy replicas at a port of this machine."""
    import ray
    from ray import serve

    from perdure.ext.cluster.ray.application import NAME, build

    # A machine that has other work, too, takes its time to start all these processes.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")
    # By Ray's own default replicas have the least priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Each of its many processes would start as many threads as there are cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    with pytest.MonkeyPatch.context() as patch:
        # A runtime_env would start Ray's processes twice.
        patch.setenv("PYTHONPATH", paths)
        _start(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("api", "client"):
                patch.setattr(f"ray.serve._private.{name}.HTTP_PROXY_TIMEOUT", 600)
            serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = ClusterConfig.from_dict(
            {
                "store": store,
                "blocks": [f"file://{folder}/shared"],
                "replicas": {"cpus": 0.5, "grace_seconds": 60, **replicas},
            }
        )
        serve.run(build(config, open_runtime=toy), name=NAME)
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def replica_processes() -> list[psutil.Process]:
    """The processes of replicas, as Ray calls them."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        words = " ".join(each.info["cmdline"] or ())
        if "ServeReplica:perdure:Replica" in words:
            found.append(each)
    return found


def test_a_session_stays_where_it_is_warm_and_new_ones_are_spread(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    with (
        ray_serve(postgres, tmp_path, min=2, max=2) as url,
        httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
    ):
        reuse: dict[str, list[str]] = {}
        for turn in range(4):
            for number in range(6):
                name = f"s{number}"
                answer = client.post(
                    "/v1/chat/completions",
                    json={
                        "model": "toy",
                        "messages": [{"role": "user", "content": f"{name} says {turn}"}],
                        "perdure": {"session": name},
                        "max_tokens": 4,
                    },
                )
                assert answer.status_code == 200, answer.text
                reuse.setdefault(name, []).append(answer.headers["x-perdure-reuse"])
        # From the second turn on, each is answered out of what is at hand where it was.
        for name, tiers in reuse.items():
            assert all("slot=" in each or "memory=" in each for each in tiers[1:]), (name, tiers)
        # And streams come through.
        with client.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": "toy", "stream": True, "messages": [{"role": "user", "content": "hi"}]},
        ) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert client.get("/v1/nothing").status_code == 404
        assert client.post("/v1/chat/completions", content=b"x" * (17 << 20)).status_code == 413


def test_replicas_are_added_by_requests_and_by_memory() -> None:
    """As Ray calls it: the policy is pickled and read back."""
    from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

    from perdure.ext.cluster.ray.application import scale

    policy = AutoscalingPolicy(policy_function=scale)
    config = AutoscalingConfig(min_replicas=1, max_replicas=4, target_ongoing_requests=2, policy=policy)

    def wanted(requests: float, **full: float) -> int:
        context = AutoscalingContext(
            deployment_id=None,
            deployment_name="Replica",
            app_name="perdure",
            current_num_replicas=len(full),
            target_num_replicas=len(full),
            running_replicas=[],
            total_num_requests=requests,
            total_queued_requests=0,
            aggregated_metrics={"full": full},
            raw_metrics=None,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=4,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=0,
            config=config,
        )
        return int(policy.get_policy()(context)[0])

    assert wanted(7, a=0.1) == 4
    assert wanted(1, a=0.95) == 2
    assert wanted(1, a=0.95, b=0.2) == 1
    assert wanted(0, a=0.95) == 1


def test_replicas_that_are_killed_lose_no_acknowledged_turn(postgres: PostgresServer, tmp_path: Path) -> None:
    """N1: 4 replicas under Ray, 64 conversations, one kill -9 every 5 s for 5 minutes."""
    outcome, dice, seconds = Outcome(), random.Random(1), soak_seconds(300)

    def kill() -> bool:
        alive = replica_processes()
        if alive:
            dice.choice(alive).send_signal(signal.SIGKILL)
        return bool(alive)

    with ray_serve(postgres, tmp_path, min=4, max=4) as url:
        killed = under_kills(url, outcome, kill, conversations=64, seconds=seconds, every=5)
        check(url, outcome)
    print(f"{killed} kills, {outcome}")
    assert killed > seconds / 20


def test_one_to_four_and_back_without_a_failed_request(postgres: PostgresServer, tmp_path: Path) -> None:
    """Ray adds replicas by the queue and takes them away again; no client sees anything of it."""
    outcome, counts = Outcome(), Counter[int]()
    sizes = {"min": 1, "max": 4, "requests": 2, "up_seconds": 1, "down_seconds": 2}
    with ray_serve(postgres, tmp_path, **sizes) as url:
        with talking(url, outcome, 16):
            _wait(counts, lambda: len(replica_processes()) >= 4)
        # Two go on while the others go.
        with talking(url, outcome, 2, again=False, prefix="d"):
            _wait(counts, lambda: len(replica_processes()) == 1)
        check(url, outcome)
    print(f"{outcome}; seen so often with so many replicas: {dict(counts)}")
    assert set(outcome.seen) <= {"200"}


def test_without_rays_head_replicas_go_on_and_nothing_is_lost(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """The head's process is killed under load, and what runs goes on. Ray is then started anew, as whoever
    runs it has to, and every conversation goes on there."""
    outcome, store = Outcome(), postgres.url(tmp_path / "own", lease=5)
    with ray_process(store, tmp_path) as (url, ray):
        with talking(url, outcome, 8, again=False, prefix="before"):
            _until(lambda: len(outcome.waits) > 8)
            [head] = [each for each in ray.children(recursive=True) if "gcs_server" in each.name()]
            head.kill()
            killed_at = len(outcome.waits)
        # Every one of them has come to its end.
        print(f"{len(outcome.waits) - killed_at} turns without a head; {outcome}")
        assert len(outcome.waits) == 8 * TURNS
    with ray_process(store, tmp_path) as (url, _):
        with talking(url, outcome, 4, again=False, prefix="after"):
            pass
        check(url, outcome)
    print(outcome)


@contextmanager
def ray_process(store: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """An application in a process that is killed with all that it started."""
    port = free_port()
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_child.py")), store, str(folder), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    process = psutil.Process(child.pid)
    try:
        assert child.stdout is not None
        # Ray writes there, too.
        assert any(line == "ready\n" for line in child.stdout)
        yield f"http://127.0.0.1:{port}", process
    finally:
        started = process.children(recursive=True)
        child.kill()
        child.communicate()
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(started)


def _until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.1)


def _wait(counts: Counter[int], done: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not done():
        counts[len(replica_processes())] += 1
        assert time.monotonic() < end, counts
        time.sleep(0.2)
