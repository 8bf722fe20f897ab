"""A server under prompts that are all different: does it hold its rate, and its memory?

`python -m bench.growing.serving` is the server, in a process of its own, spoken to through `bench.child`.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from bench.child import Child, serve
from bench.harness import Figure, Gauge, Pairs, Run, at_least, at_most
from bench.machine import Watch

CLIENTS = 4
_BUDGET = 8 << 20
"""Bytes of cache."""
_PARTS = 20


def server(run: Run) -> Iterator[Figure]:
    total = run.pick(50_000, 2_000)
    with Child("bench.growing.serving") as child:
        port = child.ask("start")
        # Until every cache is full, so that what grows after that is a leak.
        _ask(port, range(run.pick(12_000, 100)))
        rates: list[float] = []
        sizes: list[float] = []
        with Watch() as watch:
            for part in range(_PARTS):
                first = (part + 1) * total
                started = time.perf_counter()
                _ask(port, range(first, first + total // _PARTS))
                rates.append(total // _PARTS / (time.perf_counter() - started))
                sizes.append(psutil.Process(child.pid).memory_info().rss / (1 << 20))
    for name, unit, gauge, values, target in (
        ("rate", "requests/s", Gauge.RATE, rates, at_least(0.95)),
        ("memory", "MiB", Gauge.GROWTH, sizes, at_most(1.05)),
    ):
        if run.quick and gauge is Gauge.GROWTH:
            # So few requests fill no cache.
            continue
        yield Figure(
            name=f"{name} of a server over {total:,} different prompts, last quarter",
            against="first",
            unit=unit,
            gauge=gauge,
            pairs=Pairs(tuple(values[-_PARTS // 4 :]), tuple(values[: _PARTS // 4])),
            target=target,
            machine=watch.machine,
        )


def _ask(port: int, numbers: range) -> None:
    """A chat for each number, from several clients at once."""
    waiting, taking = iter(numbers), threading.Lock()
    errors: list[BaseException] = []

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            while True:
                with taking:
                    number = next(waiting, None)
                if number is None:
                    return
                said = {"role": "user", "content": f"{number:x} is what I say and nobody said before"}
                body = json.dumps({"messages": [said], "max_tokens": 1, "temperature": 0})
                headers = {"content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", body, headers)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 200, answer.status
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    if errors:
        raise errors[0]


def _start() -> int:
    """Serve the toy engine, for as long as this process lives. The port."""
    import perdure
    from perdure.memory import FullAttention
    from perdure.server.core.keys import Keys
    from perdure.server.core.server_state import ServerState
    from perdure.server.core.settings import Limits
    from perdure.server.http_server import HttpServer, bind
    from perdure.testing.toy import ToyModel

    runtime = perdure.open(ToyModel(FullAttention), n_ctx=512, slots=8, template="chatml", cache=_BUDGET)
    listening = bind("127.0.0.1", 0)
    listening.listen(64)
    http_server = HttpServer(ServerState(runtime=runtime, name="toy", limits=Limits(), keys=Keys()))
    arguments: dict[str, Any] = {"sockets": [listening]}
    threading.Thread(target=http_server.run, kwargs=arguments, daemon=True).start()
    port: int = listening.getsockname()[1]
    return port


if __name__ == "__main__":
    serve({"start": _start})
