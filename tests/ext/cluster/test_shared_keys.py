"""Keys, limits a minute and quotas of two replicas that share a PostgreSQL database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import perdure
from ext.cluster.servers import PostgresServer
from perdure.ext.cluster.postgres.accounts import Accounts
from perdure.ext.cluster.remote import STORE
from perdure.ext.cluster.shared_keys import SharedKeyStore
from perdure.server.core.keys import new_key
from perdure.testing.toy import ToyModel
from server.live_server import LiveServer, live_server


@contextmanager
def accounts_of(url: str) -> Iterator[Accounts]:
    with STORE.key_store(STORE.folder(url)) as store:
        assert isinstance(store, SharedKeyStore)
        yield store.accounts


@contextmanager
def two_replicas(url: str) -> Iterator[list[LiveServer]]:
    with ExitStack() as held:
        servers = []
        for number in range(2):
            runtime = held.enter_context(
                perdure.open(ToyModel(), n_ctx=256, slots=2, store=url.replace("%2Fr0", f"%2Fr{number}"))
            )
            servers.append(held.enter_context(live_server(runtime)))
        yield servers


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def ask(server: LiveServer, secret: str) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/completions",
        headers={"authorization": f"Bearer {secret or None}"},
        json={"model": "toy", "prompt": "one two three", "max_tokens": 2},
        trust_env=False,
        timeout=60,
    )


def test_a_minute_is_one_minute_for_all_replicas(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.url(tmp_path / "r0")
    secret, key = new_key("alice", requests_per_minute=5)
    with accounts_of(url) as accounts:
        accounts.add(key.digest, key.line)
    with two_replicas(url) as servers:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda number: ask(servers[number % 2], secret), range(12)))
        assert sorted(each.status_code for each in answers) == [200] * 5 + [429] * 7
        waits = [int(each.headers["retry-after"]) for each in answers if each.status_code == 429]
        assert all(1 <= each <= 61 for each in waits)
        assert ask(servers[0], "another").status_code == 401


def test_a_key_that_is_made_or_withdrawn_counts_everywhere(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.url(tmp_path / "r0")
    with two_replicas(url) as servers, accounts_of(url) as accounts:
        assert [ask(each, "").status_code for each in servers] == [200, 200], "nobody has made a key yet"
        secret, key = new_key("alice", tokens_per_day=8, sessions=1)
        accounts.add(key.digest, key.line)
        until(lambda: all(ask(each, "").status_code == 401 for each in servers))
        assert ask(servers[0], secret).status_code == 200
        # What one replica answered counts at the other: tokens of a day, by both.
        until(lambda: ask(servers[1], secret).status_code == 429)
        assert "tokens today" in ask(servers[0], secret).text
        accounts.withdraw(key.digest)
        until(lambda: all(ask(each, secret).status_code == 401 for each in servers))
        assert all(ask(each, "").status_code == 401 for each in servers), "the last key lets nobody in"


def test_sessions_of_a_namespace_are_bounded_over_all_replicas(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = postgres.url(tmp_path / "r0")
    secret, key = new_key("alice", sessions=1)
    with accounts_of(url) as accounts:
        accounts.add(key.digest, key.line)
    with two_replicas(url) as servers:
        headers = {"authorization": f"Bearer {secret}"}
        answers = [
            httpx.post(f"{each.url}/v1/sessions", json={"name": name}, headers=headers, trust_env=False)
            for each, name in zip(servers, ("a", "b"), strict=True)
        ]
        assert answers[0].status_code < 300, answers[0].text
        assert answers[1].status_code in (413, 429, 507), answers[1].text


def test_what_was_used_survives_and_is_added_up(postgres: PostgresServer, tmp_path: Path) -> None:
    from perdure.ext.cluster.shared_keys import SharedUsage

    url = postgres.url(tmp_path / "r0")
    _, key = new_key("alice")
    with accounts_of(url) as accounts:
        one, two = SharedUsage(accounts), SharedUsage(accounts)
        now = time.time()
        for each in (one, two):
            each.spend(key, now, prompt=10, completion=3)
            each.reply(key, now, cached=4)
        one.exchange()
        two.exchange()
        one.exchange()
        for each in (one, two, SharedUsage(accounts)):
            each.exchange()
            [day] = each.days(key).values()
            assert (day.requests, day.prompt_tokens, day.cached_tokens, day.completion_tokens) == (
                2,
                20,
                8,
                6,
            )


def test_a_database_that_is_away_costs_no_request(postgres: PostgresServer, tmp_path: Path) -> None:
    """Minutes are then counted by each replica, and what was used is sent later."""
    from perdure.ext.cluster.shared_keys import SharedUsage

    url = postgres.url(tmp_path / "r0")
    _, key = new_key("alice", requests_per_minute=2)
    with accounts_of(url) as accounts:
        usage = SharedUsage(accounts)
    # Closed: every call fails.
    assert [usage.admit(key, 0.0, 0.0) is None for _ in range(3)] == [True, True, False]
    usage.spend(key, time.time(), prompt=10)
    usage.save()
    with pytest.raises(perdure.StoreError):
        usage.exchange()
    with accounts_of(url) as accounts:
        usage.accounts = accounts
        usage.exchange()
        [day] = usage.days(key).values()
        assert day.prompt_tokens == 10


def test_the_command_keeps_keys_in_the_database(
    postgres: PostgresServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from perdure.cli.app import start

    url = postgres.url(tmp_path / "r0")

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            start([*words, "--store", url])
        assert not ended.value.code
        return capsys.readouterr().out

    secret = run("keys", "add", "alice", "--requests-per-minute", "7").strip()
    assert secret.startswith("pk-")
    listed = run("keys", "ls")
    assert "alice" in listed
    assert "7 requests a minute" in listed
    assert "is noted yet" in run("keys", "usage")
    assert "is out of" in run("keys", "rm", "alice")
    assert "no keys in" in run("keys", "ls")
