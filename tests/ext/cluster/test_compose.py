"""What compose.yaml says, run without containers: its commands and its files as they are, but for addresses
and folders. A name server stands for Docker's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from ext.cluster.harness import haproxy_program
from ext.cluster.names import NameServer
from ext.cluster.servers import PostgresServer, Server, free_port, program

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
FOLDER = Path(__file__).parents[3] / "deploy" / "cluster"


class Composed:
    """The services of the file on one machine: each replica has a separate address."""

    def __init__(self, postgres: PostgresServer, folder: Path, model: Path) -> None:
        self.services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
        self._postgres, self._folder = postgres, folder
        self._port = free_port()
        self.names = NameServer()
        self.replicas: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PERDURE_MODEL": str(model),
            "PERDURE_THREADS": "1",
        }

    def command(self, service: str, home: str, **addresses: str) -> tuple[list[str], dict[str, str]]:
        """A command of the file with its environment, for this machine."""
        told = self.services[service]
        assert told["entrypoint"] == ["/opt/perdure/bin/perdure"]
        words = [sys.executable, "-m", "perdure.cli", *told["command"]]
        changed = {
            "--host=0.0.0.0": f"--host={addresses.get('host')}",
            "--port=8080": f"--port={self._port}",
            "file:///shared": f"file://{self._folder}/shared",
        }
        for old, new in changed.items():
            words = [word.replace(old, new) for word in words]
        store = told["environment"]["PERDURE_STORE"].replace(
            "@postgres/", f"@127.0.0.1:{self._postgres.port}/"
        )
        password = told["environment"]["PGPASSWORD"]
        assert password.startswith("${POSTGRES_PASSWORD:?")
        more = {"PGPASSWORD": "secret", "PERDURE_STORE": store, "PERDURE_HOME": str(self._folder / home)}
        return words, {**self._environment, **more}

    def run(self, service: str) -> str:
        words, environment = self.command(service, service)
        return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout

    def start(self, number: int) -> str:
        """One more replica; its address."""
        address = f"127.0.1.{number}"
        words, environment = self.command("replica", f"replica{number}", host=address)
        with (self._folder / f"replica{number}.log").open("ab") as out:
            self.replicas[address] = subprocess.Popen(words, env=environment, stdout=out, stderr=out)
        # Docker names a container before what is in it listens.
        self.names.addresses.append(address)
        return address

    def stop(self, address: str) -> int:
        """As `docker stop`: its name is gone when it is."""
        replica = self.replicas.pop(address)
        replica.terminate()
        code = replica.wait(60)
        self.names.addresses.remove(address)
        return code

    def router(self) -> tuple[Server, str]:
        told = self.services["router"]
        [mounted] = told["volumes"]
        source, target, _ = mounted.split(":")
        # Where the image looks for it.
        assert target == "/usr/local/etc/haproxy/haproxy.cfg"
        listening, text = free_port(), (FOLDER / source).read_text()
        for old, new in (
            ("bind :8080", f"bind 127.0.0.1:{listening}"),
            ("parse-resolv-conf", f"nameserver here 127.0.0.1:{self.names.port}"),
            ("replica:8080", f"replica:{self._port}"),
        ):
            assert old in text
            text = text.replace(old, new)
        path = self._folder / "haproxy.cfg"
        path.write_text(text)
        command = [haproxy_program(), "-W", "-db", "-f", str(path)]
        return Server(command, listening, self._folder / "haproxy.log"), f"http://127.0.0.1:{listening}"

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self._folder.glob("*.log"))


@pytest.fixture
def composed(postgres: PostgresServer, zoo_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Composed]:
    with psycopg.connect(
        f"postgresql://perdure@127.0.0.1:{postgres.port}/postgres", autocommit=True
    ) as connection:
        connection.execute("DROP DATABASE IF EXISTS perdure")
        connection.execute("CREATE DATABASE perdure")
    made = Composed(postgres, tmp_path, zoo_path("llama"))
    with closing(made.names):
        try:
            yield made
        finally:
            for replica in made.replicas.values():
                replica.kill()
                replica.wait()


def until(true: Callable[[], bool], composed: Composed, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, composed.logs()
        time.sleep(0.2)


@pytest.mark.soak
def test_the_services_of_the_compose_file_work_together(composed: Composed, postgres: PostgresServer) -> None:
    healthy = composed.services["postgres"]["healthcheck"]["test"]
    assert healthy[0] == "CMD"
    found = program(healthy[1])
    assert found is not None
    subprocess.run([found, *healthy[2:], "-h", "127.0.0.1", "-p", str(postgres.port)], check=True)
    key = composed.run("keys").split()[-1]
    first, second = composed.start(1), composed.start(2)
    router, url = composed.router()
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            until(lambda: client.get("/ready").status_code == 200, composed)
            asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
            assert client.post("/v1/chat/completions", json=asked).status_code == 401
            client.headers["authorization"] = f"Bearer {key}"

            def say(number: int) -> str:
                told = {**asked, "perdure": {"session": f"s{number}"}}
                answer = client.post(
                    "/v1/chat/completions", json=told, headers={"x-session-id": f"s{number}"}
                )
                assert answer.status_code == 200, (answer.text, composed.logs())
                assert answer.json()["perdure"]["kept"]
                return str(answer.headers["x-request-id"])

            def answering() -> set[str]:
                """Who answers eight conversations: replicas are told apart by what they have warm."""
                for number in range(8):
                    say(number)
                return {
                    address
                    for address in composed.names.addresses
                    if any(warm(address, number) for number in range(8))
                }

            def warm(address: str, number: int) -> int:
                at = f"http://{address}:{composed._port}/v1/where"
                told = httpx.get(
                    at,
                    params={"session": f"s{number}"},
                    headers=dict(client.headers),
                    trust_env=False,
                    timeout=60,
                )
                return int(told.json()["warm"])

            def all_ready() -> bool:
                def ready(address: str) -> bool:
                    try:
                        at = f"http://{address}:{composed._port}/ready"
                        return httpx.get(at, trust_env=False, timeout=60).status_code == 200
                    except httpx.TransportError:
                        return False

                return all(map(ready, composed.names.addresses))

            until(all_ready, composed)
            until(lambda: answering() == {first, second}, composed)
            # One goes while it is asked, and its conversations go on.
            assert composed.stop(first) == 0, composed.logs()
            assert answering() == {second}
            # And one more comes, under an address that HAProxy did not know.
            third = composed.start(3)
            until(all_ready, composed)
            until(lambda: answering() == {second, third}, composed)
            kept = client.get("/v1/sessions/s0/turns").json()["data"]
            assert len(kept) >= 3
    finally:
        router.kill()
