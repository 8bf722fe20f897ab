"""State that several machines share: a directory, S3 and Redis, encrypted with the cluster's key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import perdure
from cache.test_tiers import PROMPT, ask
from ext.cluster.proxy import Proxy
from ext.cluster.servers import PostgresServer, RedisServer, redis_server
from perdure.backend import BlockStorage, LocalBackend
from perdure.cache.tiers.codec import MARK
from perdure.cache.tiers.disk import DiskTier
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.cli.app import app
from perdure.engine_config import EngineConfig
from perdure.errors import InvalidInputError, StoreError, TooLargeError
from perdure.ext.cluster import shared
from perdure.ext.cluster.checks import findings
from perdure.ext.cluster.places import DirectoryPlace, Place, RedisPlace, open_place, parse_place
from perdure.ext.cluster.shared import SharedTier
from perdure.ext.encryption.cipher import Cipher
from perdure.sessions.store.registry import cluster_key
from perdure.testing.toy import ToyModel
from sessions.talking import talking
from store.chains import chain, root, same, size
from subjects import Subject

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'perdure[cluster]'")

KEY, PLENTY = b"k" * 32, 1 << 30
Url = Callable[[], str]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install 'perdure[cluster]'")
    known = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in known}
    os.environ.update(known)
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="blocks")
        yield endpoint
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(params=["file", "s3", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place that is empty."""
    if request.param == "file":
        return f"file://{tmp_path}/place"
    if request.param == "s3":
        return f"s3://blocks/{tmp_path.name}?endpoint={request.getfixturevalue('s3')}"
    server: RedisServer = request.getfixturevalue("redis")
    import redis as client

    with closing(client.Redis.from_url(server.url)) as db:
        db.flushall()
    return f"{server.url}?tokens=100000"


@pytest.fixture
def machine(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SharedTier]]:
    """Opens the place as another machine would. Lists are read only when the test says so: a list that the
    watching thread reads beside a `drop` brings back what was dropped."""
    monkeypatch.setattr(SharedTier, "_watch", lambda tier: None)
    with ExitStack() as held:

        def opened(*, key: bytes = KEY, identity: bytes = b"i", budget: int = PLENTY) -> SharedTier:
            place, _, _ = open_place(url)
            tier = SharedTier(place, key=key, identity=identity, budget=budget)
            held.callback(tier.close)
            return tier

        yield opened


def test_what_one_machine_computed_another_reads_bit_for_bit(machine: Callable[..., SharedTier]) -> None:
    first, second = machine(), machine()
    blocks = chain(range(1, 30), tail_state=9)
    assert first.store(blocks) == len(blocks)
    second.refresh()
    for block in blocks:
        meta = second.lookup(block.id)
        assert meta is not None
        assert (meta.parent, meta.start, list(meta.tokens), meta.has_tail_state) == (
            block.parent,
            block.start,
            list(block.tokens),
            True,
        )
        assert same(second.load(block.id), block)
    assert [meta.id for meta in second.children(root())] == [blocks[0].id]
    # Once: a second machine that has it too writes nothing.
    assert second.store(blocks) == len(blocks)
    assert second.stored == 0
    second.drop([blocks[3].id])
    assert first.load(blocks[3].id) is None
    assert same(first.load(blocks[2].id), blocks[2])
    first.clear()
    third = machine()
    third.refresh()
    assert len(third) == 0


def test_n3_who_has_another_key_finds_nothing_and_is_believed_nothing(
    machine: Callable[..., SharedTier],
) -> None:
    """N3: also where blocks are exchanged, cut short, or changed by a bit."""
    first, stranger = machine(), machine(key=b"x" * 32)
    blocks = chain(range(1, 20))
    first.store(blocks)
    stranger.refresh()
    assert len(stranger) == 0
    assert stranger.load(blocks[0].id) is None
    # It knows a block's name and writes what it likes there: the key's own name for it is another one.
    stranger.store(blocks)
    for block in blocks:
        assert same(first.load(block.id), block)
    # Whoever may write to the place exchanges objects, or changes a byte.
    place = first.place
    names = [Cipher(KEY).name(block.id).hex() for block in blocks]
    whole = place.get(names[0], PLENTY)
    assert whole is not None
    other = place.get(names[1], PLENTY)
    assert other is not None
    place.put(names[0], other)
    assert first.load(blocks[0].id) is None
    place.put(names[0], whole[:-1] + bytes([whole[-1] ^ 1]))
    assert first.load(blocks[0].id) is None
    for short in (b"", b"x", whole[:12], whole[:40]):
        place.put(names[0], short)
        assert first.load(blocks[0].id) is None
    place.put(names[0], whole)
    assert same(first.load(blocks[0].id), blocks[0])


def test_nothing_that_is_kept_can_be_read_or_guessed(machine: Callable[..., SharedTier]) -> None:
    first = machine()
    blocks = chain(range(1000, 1020))
    first.store(blocks)
    for block in blocks:
        name = Cipher(KEY).name(block.id).hex()
        data = first.place.get(name, PLENTY)
        assert data is not None
        assert block.rows is not None
        assert block.rows.tobytes() not in data
        assert block.tokens.tobytes() not in data
        assert block.id.hex() not in name
    for name in first.place.names("list-"):
        listed = first.place.get(name, PLENTY)
        assert listed is not None
        assert blocks[0].tokens.tobytes() not in listed
        assert bytes(blocks[0].id) not in listed


def test_lists_do_not_pile_up_and_lose_nothing(
    machine: Callable[..., SharedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is a separate list; two machines merge them, and a third reads all blocks still."""
    monkeypatch.setattr(shared, "_FRESH", 4)
    monkeypatch.setattr(shared, "_MERGED", 8)
    one, two = machine(), machine()
    blocks = chain(range(1, 4 * 24 + 1))
    for at, block in enumerate(blocks):
        (one, two)[at % 2].refresh()
        (one, two)[at % 2].store([block])
        two.refresh()
        one.refresh()
    names = list(one.place.names("list-"))
    assert len(names) <= 4 + 2 * (len(blocks) // 8 + 1) + 1, names
    third = machine()
    third.refresh()
    assert len(third) == len(blocks)
    assert all(same(third.load(block.id), block) for block in blocks)
    # What is gone is in no list any more, once they are merged.
    third.drop([blocks[5].id])
    third._merge(set(third.place.names("list-")))
    fourth = machine()
    fourth.refresh()
    assert len(fourth) == 5
    third.clear()
    assert not list(third.place.names("list-"))


# What others wrote there.

HUGE = 3 << 30


def spoil(place: Place, name: str) -> None:
    """Have an object that is larger than memory should pay for: in a directory, a file with nothing in it."""
    if isinstance(place, DirectoryPlace):
        path = place.folder / ("lists" if "-" in name else name[:2]) / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(HUGE)
    else:
        place.put(name, bytes(32 << 20))


def test_an_object_that_is_too_large_is_not_read_y7(
    machine: Callable[..., SharedTier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Y7: a list or a block of any size in a shared place costs no memory, and no list behind it."""
    monkeypatch.setattr(shared, "_LIST_BYTES", 1 << 20)
    monkeypatch.setattr(shared, "_SPARE", 1 << 20)
    first, second = machine(), machine()
    # Before the true list and behind it.
    for name in (f"list-{first.identity}-!", f"list-{first.identity}-~"):
        spoil(first.place, name)
        with pytest.raises(TooLargeError):
            first.place.get(name, 1 << 20)
    blocks = chain(range(1, 30))
    first.store(blocks)
    spoil(first.place, Cipher(KEY).name(blocks[0].id).hex())
    with caplog.at_level("WARNING", "perdure.store"):
        second.refresh()
        assert len(second) == len(blocks)
        assert caplog.text.count("is left out, which no engine wrote there") == 2
        # Once: it is not read again every two seconds, nor merged for ever.
        second.refresh()
        assert caplog.text.count("is left out") == 2
    assert second.load(blocks[0].id) is None
    assert same(second.load(blocks[1].id), blocks[1])


def test_links_pipes_and_folders_in_a_shared_directory_are_left_out_y7(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Y7: a pipe is not waited for, and a link leads nowhere, not even to an object of ours."""
    monkeypatch.setattr(SharedTier, "_watch", lambda tier: None)
    with ExitStack() as held:
        first, second = (
            held.enter_context(
                closing(SharedTier(DirectoryPlace(tmp_path), key=KEY, identity=b"i", budget=PLENTY))
            )
            for _ in range(2)
        )
        blocks = chain(range(1, 30))
        first.store(blocks)
        lists = tmp_path / "lists"
        prefix = f"list-{first.identity}-"
        os.mkfifo(lists / f"{prefix}0-pipe")
        (lists / f"{prefix}1-folder").mkdir()
        (lists / f"{prefix}2-link").symlink_to(next(lists.glob("list-*[0-9a-f]")).absolute())
        (lists / f"{prefix}3-dangling").symlink_to(tmp_path / "nowhere")
        (lists / f"{prefix}4-device").symlink_to("/dev/zero")
        with caplog.at_level("WARNING", "perdure.store"):
            second.refresh()
        assert caplog.text.count("is left out") == 5
        assert len(second) == len(blocks)
        path = tmp_path / Cipher(KEY).name(blocks[0].id).hex()[:2] / Cipher(KEY).name(blocks[0].id).hex()
        path.unlink()
        os.mkfifo(path)
        assert second.load(blocks[0].id) is None
        assert same(second.load(blocks[1].id), blocks[1])


def test_p6_a_place_keeps_to_its_budget(machine: Callable[..., SharedTier]) -> None:
    blocks = chain(range(1, 40))
    tier = machine(budget=size(blocks[:4]))
    kept = tier.store(blocks)
    assert 0 < kept <= 4
    assert tier.nbytes <= tier.budget
    other = chain(range(100, 110), "other")
    tier.store(other)
    assert tier.nbytes <= tier.budget
    assert same(tier.load(other[0].id), other[0])


def test_n3_machines_whose_engines_differ_share_nothing_and_it_can_be_said(
    machine: Callable[..., SharedTier],
) -> None:
    """N3: only under the same identity."""
    first, second = machine(identity=b"avx2"), machine(identity=b"avx512")
    first.store(chain(range(1, 20)))
    second.refresh()
    assert len(second) == 0
    second.store(chain(range(1, 20), "avx512"))
    assert second.identities() == {first.identity, second.identity}
    assert first.identity != second.identity


def test_a_place_that_fails_is_left_alone_for_a_while_and_comes_back(
    machine: Callable[..., SharedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = machine()
    blocks = chain(range(1, 20))
    tier.store(blocks)
    calls: list[str] = []

    def failing(name: str, limit: int) -> bytes | None:
        calls.append(name)
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(tier.place, "get", failing)
        for _ in range(5):
            with pytest.raises(StoreError):
                tier.load(blocks[0].id)
        assert len(calls) == 1
        assert tier.refused == 4
        assert tier.lookup(blocks[0].id) is None
    monkeypatch.setattr(shared, "_REST", 0.0)
    assert same(tier.load(blocks[0].id), blocks[0])
    assert tier.lookup(blocks[0].id) is not None


def test_what_was_written_when_a_place_failed_is_known_to_others_in_the_end(
    machine: Callable[..., SharedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails between two blocks, or between blocks and their list: they are there, and are listed when it
    is well again, by whoever writes or looks next."""
    monkeypatch.setattr(shared, "_REST", 0.0)
    first, second = machine(), machine()
    blocks, more = chain(range(1, 40)), chain(range(101, 140))

    def fails_at(writes: int) -> Callable[[str, bytes], None]:
        put, left = first.place.put, iter(range(writes))

        def failing(name: str, data: bytes) -> None:
            if next(left, None) is None:
                raise OSError("no route to host")
            put(name, data)

        return failing

    for chained, writes in ((blocks, 3), (more, len(more))):
        with monkeypatch.context() as patch:
            patch.setattr(first.place, "put", fails_at(writes))
            with pytest.raises(StoreError):
                first.store(chained)
    second.refresh()
    assert len(second) == 0
    first.refresh()
    second.refresh()
    assert len(second) == 3 + len(more)
    first.store(blocks)
    second.refresh()
    assert all(same(second.load(each.id), each) for each in (*blocks, *more))
    assert all(second.lookup(each.id) is not None for each in (*blocks, *more))


def test_redis_keeps_to_its_bytes_over_all_machines(redis: RedisServer) -> None:
    """The bound is the server's, counted in one step, whoever writes."""
    with closing(RedisPlace(redis.url, size=10_000)) as first:
        first._redis.flushall()
        with closing(RedisPlace(redis.url, size=10_000)) as second:
            for number in range(30):
                (first, second)[number % 2].put(f"{number:064x}", b"x" * 999)
                assert first.nbytes <= 10_000
            assert first.nbytes == 9990
            assert first.get(f"{0:064x}", PLENTY) is None
            assert second.get(f"{29:064x}", PLENTY) == b"x" * 999
            first.put(f"{29:064x}", b"y")
            assert first.nbytes == 8992
            first.delete([f"{29:064x}"])
            assert first.nbytes == 8991
            with pytest.raises(StoreError, match="does not fit"):
                first.put("a" * 64, b"x" * 10_001)


def test_redis_counts_what_two_machines_delete_at_once_a_single_time(redis: RedisServer) -> None:
    """Both make room by the same object: what is counted twice lets the server grow past its bound."""
    names = [f"{number:064x}" for number in range(300)]
    with closing(RedisPlace(redis.url, size=1 << 20)) as place:
        place._redis.flushall()
        for name in names:
            place.put(name, b"x" * 100)
        both = threading.Barrier(4)

        def delete() -> None:
            both.wait()
            for name in names:
                place.delete([name])

        threads = [threading.Thread(target=delete) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert place.nbytes == 0


def test_redis_that_is_cut_off_or_stopped_costs_a_computation_and_no_reply(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.ext.cluster import places

    monkeypatch.setattr(places, "_SECONDS", 0.2)
    monkeypatch.setattr(shared, "_REST", 0.0)
    with closing(Proxy(redis.port)) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0?tokens=100000"
        config, storage = EngineConfig(n_ctx=512, slots=1, blocks=[url]), BlockStorage(shared_key=KEY)
        with closing(LocalBackend(ToyModel(), EngineConfig(n_ctx=512, slots=1, cache=0))) as backend:
            cold, _ = ask(backend)
        with closing(LocalBackend(ToyModel(), config, storage=storage)) as backend:
            proxy.partition()
            assert ask(backend)[0] == cold
            proxy.heal()
            redis.signal(signal.SIGSTOP)
            assert ask(backend, [9, *PROMPT])[0]
            redis.signal(signal.SIGCONT)
        # And by itself it is of use again.
        with closing(LocalBackend(ToyModel(), config, storage=storage)) as backend:
            assert ask(backend)[0] == cold
            backend.slot_cache.tiers.lower[-1].flush()
        with closing(LocalBackend(ToyModel(), config, storage=storage)) as backend:
            tier = backend.slot_cache.tiers.lower[-1].tier
            assert isinstance(tier, SharedTier)
            tier.refresh()
            tokens, reuse = ask(backend)
            assert tokens == cold
            assert reuse.tiers.get("redis", 0) > 0


def test_s4_a_directory_that_hangs_is_asked_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedTier, "patience", 0.1)
    go_on = threading.Event()

    class Hanging(DirectoryPlace):
        def get(self, name: str, limit: int) -> bytes | None:
            go_on.wait()
            return super().get(name, limit)

    tier = SharedTier(Hanging(tmp_path), key=KEY, identity=b"i", budget=PLENTY)
    behind = WriteBehind(tier)
    blocks = chain(range(1, 10))
    behind.store(blocks)
    behind.flush()
    assert behind.load(blocks[0].id) is None
    assert "has not answered" in str(behind.error)
    assert behind.lookup(blocks[0].id) is not None
    go_on.set()
    monkeypatch.setattr(SharedTier, "patience", 60.0)
    for thread in threading.enumerate():
        if thread.name == "perdure-shared-call":
            thread.join()
    assert same(behind.load(blocks[0].id), blocks[0])
    behind.close()


_WRITER = """
import sys
sys.path[:0] = sys.argv[3].split(":")
from pathlib import Path
from perdure.ext.cluster.places import DirectoryPlace
from perdure.ext.cluster.shared import SharedTier
from perdure.ext.encryption.cipher import Cipher
from store.chains import chain
tier = SharedTier(DirectoryPlace(Path(sys.argv[1])), key=b"k" * 32, identity=b"i", budget=1 << 30)
for number in range(40):
    tier.store(chain(range(number, number + 30), sys.argv[2] if number % 2 else "both"))
    print(number, flush=True)
tier.close()
"""


def test_two_processes_that_share_only_a_directory_never_see_half_a_block(tmp_path: Path) -> None:
    """Both write the same blocks, and their own; one is killed in the middle. What is listed is whole."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), name, ":".join(sys.path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        assert writers[0].stdout is not None
        while writers[0].stdout.readline() != "10\n":
            pass
        writers[0].kill()
        for writer in writers:
            writer.communicate()
        with closing(SharedTier(DirectoryPlace(tmp_path), key=KEY, identity=b"i", budget=PLENTY)) as tier:
            tier.refresh()
            assert len(tier) > 100
            for name in list(tier._table.names()):
                assert tier.load(name) is not None  # type: ignore[arg-type]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


@pytest.mark.parametrize("model", ["toy-full", "llama", "gemma3", "mamba"])
def test_a_session_sleeps_on_one_machine_and_wakes_on_another(
    model: str, find_subject: Callable[[str], Subject], postgres: PostgresServer, tmp_path: Path
) -> None:
    """W≡C: what the second machine says is checked bit by bit; its prompt came from the shared place."""
    toy = find_subject(model)
    place = f"file://{tmp_path}/shared"
    first = postgres.url(tmp_path / "one")
    second = first.replace("%2Fone", "%2Ftwo")
    text = "A first message that is long enough for some blocks. " * 4
    with talking(toy, first, blocks=[place]) as talk:  # type: ignore[arg-type]
        session = talk.session("alice")
        talk.say(session, text)
        session.sleep()
        talk.rt.backend.slot_cache.tiers.lower[-1].flush()  # type: ignore[attr-defined]
    with talking(toy, second, blocks=[place]) as talk:  # type: ignore[arg-type]
        tier = talk.rt.backend.slot_cache.tiers.lower[-1].tier  # type: ignore[attr-defined]
        tier.refresh()
        reply = talk.say(talk.session("alice"), "And a second one.")
        assert reply.reuse.tiers.get("shared", 0) >= 64
        # What came from there is on this machine's own disk from now on.
        assert talk.session("alice").turns == 2


def test_with_no_room_on_its_disk_a_machine_keeps_state_in_shared_places_alone(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    first, place = postgres.url(tmp_path / "m0"), f"file://{tmp_path}/shared"
    with perdure.open(ToyModel(), n_ctx=1024, slots=1, store=first, blocks=[place], store_bytes=0) as runtime:
        session = runtime.session("one")
        session.say("Some words, enough of them for a block or two of state. " * 4, max_tokens=4)
        session.sleep()
        tokens = session.token_count
    assert not [path for path in (tmp_path / "m0" / "blocks").rglob("*") if path.is_file()]
    with closing(DiskTier(tmp_path / "m0", budget=0, readonly=True)) as disk:
        assert len(disk) == 0
    second = first.replace("%2Fm0", "%2Fm1")
    with perdure.open(
        ToyModel(), n_ctx=1024, slots=1, store=second, blocks=[place], store_bytes=0
    ) as runtime:
        runtime.backend.slot_cache.tiers.lower[-1].tier.refresh()  # type: ignore[attr-defined]
        report = runtime.session("one").wake()
        assert sum(report.tiers.values()) >= tokens - 1, report


def test_disks_that_are_encrypted_with_the_clusters_key_or_one_of_their_own_share_state(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Names of blocks are made by keys on the disk alone: machines know the same blocks by the same ids."""
    key, place = tmp_path / "key", f"file://{tmp_path}/shared"
    key.write_bytes(b"k" * 32)
    text = "Some words, enough of them for a block or two of state. " * 4
    first, tokens = postgres.url(tmp_path / "m0"), 0
    for number, encrypt in enumerate(("cluster", str(key), None)):
        url = first.replace("%2Fm0", f"%2Fm{number}")
        with perdure.open(
            ToyModel(), n_ctx=1024, slots=1, store=url, blocks=[place], encrypt=encrypt
        ) as runtime:
            runtime.backend.slot_cache.tiers.lower[-1].tier.refresh()  # type: ignore[attr-defined]
            session = runtime.session("one")
            if not number:
                session.say(text, max_tokens=4)
                tokens = session.token_count
            else:
                assert session.wake().tiers.get("shared", 0) >= 64
            session.sleep()
        if encrypt == "cluster":
            # The key is in the database, and nowhere on this machine.
            assert json.loads((tmp_path / "m0" / MARK).read_text())["key"] == "cluster"
            with perdure.open(ToyModel(), n_ctx=1024, slots=1, store=url) as runtime:
                assert runtime.session("one").wake().tiers.get("disk", 0) >= tokens - 1
        mine = [
            path.read_bytes() for path in (tmp_path / f"m{number}" / "blocks").rglob("*") if path.is_file()
        ]
        assert mine
        assert any(b"PERDBLK" in data for data in mine) == (encrypt is None)


def test_a_place_needs_the_key_of_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="PostgreSQL"):
        cluster_key(tmp_path, [f"file://{tmp_path}"])
    with pytest.raises(InvalidInputError, match="key"):
        LocalBackend(ToyModel(), EngineConfig(n_ctx=512, blocks=[f"file://{tmp_path}"]))


@pytest.mark.parametrize(
    "text",
    [
        "http://x",
        "file://host/x",
        "file:///",
        "file:relative",
        "s3:///x",
        "file:///x?size=0",
        "file:///x?size=nan",
        "file:///x?tokens=-1",
        "file:///x?what=1",
        "redis://h/0?size=x",
    ],
)
def test_a_place_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_place(text)


def test_a_place_that_cannot_be_reached_is_left_out(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    url = f"file://{tmp_path}/file"
    config, storage = EngineConfig(n_ctx=512, slots=1, blocks=[url]), BlockStorage(shared_key=KEY)
    with closing(LocalBackend(ToyModel(), config, storage=storage)) as backend:
        assert ask(backend)[0]
        assert not backend.slot_cache.tiers.lower
    assert "runs without it" in caplog.text


@pytest.mark.extension("machine")
def test_doctor_tries_a_place_and_says_that_engines_differ(
    machine: Callable[..., SharedTier], url: str, tmp_path: Path
) -> None:
    machine(identity=b"avx2").store(chain(range(1, 9)))
    ran = CliRunner().invoke(app, ["doctor", "--blocks", url, "--json"])
    [found] = [each for each in json.loads(ran.stdout) if each["name"] == "blocks"]
    assert found["state"] == "ok", found
    machine(identity=b"avx512").store(chain(range(1, 9)))
    [found] = list(findings(tmp_path, [url]))
    assert (found.state, "2 kinds of engines" in found.found) == ("warn", True)
    [found] = list(findings(tmp_path, ["redis://127.0.0.1:1/0"]))
    assert found.state == "bad"


def test_the_contract_of_a_place_is_small() -> None:
    assert Place.__abstractmethods__ == {"put", "get", "delete", "names"}
