"""Sessions as files: moved to another store, damaged, cut short, put together wrongly."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import (
    CorruptStateError,
    IncompatibleStateError,
    Message,
    SessionExistsError,
    StateError,
    StoreError,
    Turn,
)
from perdure.cache.block import Block
from perdure.ext.upkeep.export import manifest_of, read_export
from perdure.testing.toy import ToyModel
from sessions.talking import said, talking
from subjects import Subject

LONG = "A rather long message, so that there is more than one block of it to be taken along and put back"


def exported(subject: Subject, folder: Path, **settings: Any) -> Path:
    with talking(subject, folder / "from") as talk:
        s = talk.session("alice", system="Be terse.", seed=3)
        talk.say(s, LONG)
        talk.say(s, "And then?")
        return s.export(folder / "alice.perdure", **settings)


def test_a_session_moves_to_another_store_with_its_state(subject: Subject, tmp_path: Path) -> None:
    path = exported(subject, tmp_path)
    with talking(subject, tmp_path / "to") as talk:
        s = talk.rt.sessions.import_(path, "anna", trust_state=True).session
        assert [ask for ask, _ in said(s)] == [LONG, "And then?"]
        assert (s.system, dict(s.settings)) == ("Be terse.", {"seed": 3})
        assert dict(s.origin) == {"how": "import", "session": "alice", "turn": 2}
        reply = talk.say(s, "Go on")
        assert reply.reuse.reused > 80
    with talking(subject, tmp_path / "to") as talk:
        assert talk.say(talk.session("anna"), "Still there?").reuse.reused > 80


def test_an_export_with_state_leaves_no_turn_in_memory(toy: Subject, tmp_path: Path) -> None:
    """X20: what is written is read page by page, and its tokens are put together on the way."""
    with talking(toy, tmp_path) as talk:
        s = talk.session("alice")
        for number in range(4):
            talk.say(s, f"{number} {LONG}")
        expected = s.tokens
    with talking(toy, tmp_path) as talk:
        s = talk.rt.sessions.get("alice")
        path = s.export(tmp_path / "alice.perdure")
        assert s.turns_at_hand == 0
        assert read_export(path).has_state
        assert tuple(s._tokens_with_state()) == expected == s.tokens
        assert s.turns_at_hand > 4 * len(LONG)


def test_without_its_state_the_words_and_tokens_come_over(subject: Subject, tmp_path: Path) -> None:
    path = exported(subject, tmp_path, state=False)
    assert path.stat().st_size < 40_000
    with talking(subject, tmp_path / "to") as talk:
        s = talk.rt.sessions.import_(path).session
        assert talk.say(s, "Go on").reuse.reused == 0


def test_state_of_another_identity_is_not_taken(toy: Subject, tmp_path: Path) -> None:
    """C11: the text comes over and the state is recomputed."""
    path = exported(toy, tmp_path)
    other = Subject("toy-full", ToyModel(seed=9), toy.rounding)
    with talking(other, tmp_path / "to") as talk:
        s = talk.rt.sessions.import_(path).session
        assert [ask for ask, _ in said(s)] == [LONG, "And then?"]
        assert talk.say(s, "Go on").reuse.reused == 0


def test_an_export_holds_nothing_of_a_conversation_that_began_alike(toy: Subject, tmp_path: Path) -> None:
    """H5: blocks are shared by all that begin alike, and one may go on with another's words."""
    with talking(toy, tmp_path / "store") as talk:
        long, short = talk.session("long"), talk.session("short")
        talk.say(long, "Hello", max_tokens=30)
        talk.say(long, "a secret", max_tokens=30)
        talk.say(short, "Hello", max_tokens=4)
        path = short.export(tmp_path / "short.perdure")
        held = [token for block in read_export(path).blocks() for token in block.tokens.tolist()]
        assert held
        assert held == list(short.tokens)[: len(held)]
        assert talk.rt.sessions.import_(path, "again").left_out == {}


def test_an_export_names_its_kind_and_no_path(toy: Subject, tmp_path: Path) -> None:
    """S7: the default is the record's own kind."""
    with talking(toy, tmp_path / "from") as talk:
        s = talk.session("alice")
        talk.say(s, LONG)
        folded = s.fold("folded", summary="x")
        kinds = {
            each.export(tmp_path / f"{number}.perdure", kind=kind): kind or each.kind
            for number, (each, kind) in enumerate([(s, None), (folded, None), (s, "archive")])
        }
    for path, kind in kinds.items():
        assert manifest_of(path)["kind"] == kind
        data = path.read_bytes()
        for trace in (str(tmp_path), str(Path.home()), str(Path.cwd())):
            assert trace.encode() not in data
    assert [manifest_of(path)["kind"] for path in kinds] == ["session", "fold", "archive"]
    with talking(toy, tmp_path / "to") as talk:
        for number, path in enumerate(kinds):
            talk.rt.sessions.import_(path, f"s{number}")
        assert {row.kind for row in talk.rt.sessions.list()} == {"session", "fold", "archive"}


def test_a_name_that_is_taken_is_refused(toy: Subject, tmp_path: Path) -> None:
    path = exported(toy, tmp_path)
    with talking(toy, tmp_path / "to") as talk:
        talk.rt.sessions.import_(path)
        with pytest.raises(SessionExistsError):
            talk.rt.sessions.import_(path)


def test_progress_is_told(toy: Subject, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = exported(toy, tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    read: list[tuple[int, int]] = []
    read_export(path, progress=lambda done, total: read.append((done, total)))
    assert read[-1] == told[-1]


# S5: what a caller gives is copied.


def test_s5_a_state_that_was_loaded_is_not_the_callers(subject: Subject) -> None:
    """S5: a caller's bytearray, changed afterwards, changes nothing that is held."""
    with subject.context() as ctx:
        ctx.decode(subject.tokens(30))
        given = bytearray(ctx.save())
        ctx.load(given, seq=1)
        held = ctx.save(1)
        given[:] = bytes(len(given))
        assert ctx.save(1) == held


def test_s5_blocks_that_were_taken_in_are_not_the_callers(subject: Subject) -> None:
    """S5: and neither is kept state; were it shared, it would be found damaged and computed anew."""
    with talking(subject) as talk:
        s = talk.session("alice")
        talk.say(s, LONG)
        tokens = s.tokens
        identity, blocks = talk.rt.cache.pack(tokens)
        own = [
            Block.make(
                block.parent,
                block.start,
                block.tokens.copy(),
                None if block.rows is None else block.rows.copy(),
                None if block.tail_state is None else block.tail_state.copy(),
            )
            for block in blocks
        ]
    with talking(subject) as talk:
        taken = talk.rt.cache.unpack(identity, own)
        assert taken > 60
        for block in own:
            for part in (block.rows, block.tail_state, block.tokens):
                if part is not None:
                    part[...] = 0
        plan = talk.rt.cache.plan(tokens)
        report = talk.rt.cache.wake(tokens)
        assert dict(report.tiers) == dict(plan.tiers) == {"memory": taken}


def test_s5_settings_are_not_the_callers(toy: Subject, tmp_path: Path) -> None:
    """S5: a list in them, changed afterwards, changes neither the session nor its turns."""
    stops = ["no such text"]
    with talking(toy, tmp_path) as talk:
        s = talk.session("alice", stop=stops)
        talk.say(s, "Hello")
        stops.append("nor this")
        assert s.settings["stop"] == s.history()[0].settings["stop"] == ["no such text"]
    with talking(toy, tmp_path) as talk:
        assert talk.session("alice").settings["stop"] == ["no such text"]


# Damage.


def refused(path: Path) -> bool:
    try:
        read_export(path)
    except (StateError, StoreError):
        return True
    return False


def flips(subject: Subject, folder: Path, sampled: int, members: int | None) -> None:
    """In the headers of the first `members` of the archive, and in sampled places of all of it."""
    path = exported(subject, folder)
    data = path.read_bytes()
    right = read_export(path)
    with tarfile.open(path) as archive:
        parts = archive.getmembers()
    headers = [part.offset for part in parts[:members]]
    # A seal proves something to one store alone: without it, less is taken.
    contents = [
        range(part.offset_data, part.offset_data + part.size) for part in parts if part.name != "seal"
    ]
    damaged = folder / "damaged.perdure"
    rng = random.Random(7)
    # Names, sizes, kinds and checksums: what follows in a header are owners, and nothing.
    places = [at + place for at in headers for place in range(265)]
    places += rng.sample(range(len(data)), sampled)
    seen = 0
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        damaged.write_bytes(flipped)
        try:
            found = read_export(damaged)
        except (StateError, StoreError):
            seen += 1
            continue
        assert not any(place in content for content in contents), place
        # What is left are fields of the archive that nobody reads, such as times and owners.
        assert (found.name, found.kind, found.settings) == (right.name, right.kind, right.settings)
        assert found.identity == right.identity
        assert [turn.digest for turn in found.turns] == [turn.digest for turn in right.turns]
        assert found.parts == right.parts
    assert seen > 0.6 * len(places)


def test_every_flip_that_matters_is_seen(toy: Subject, tmp_path: Path) -> None:
    """P2: refused, or nothing that is read has changed."""
    flips(toy, tmp_path, sampled=100, members=2)


@pytest.mark.soak
def test_every_flip_that_matters_is_seen_for_long(toy: Subject, tmp_path: Path) -> None:
    flips(toy, tmp_path, sampled=2000, members=None)


def test_an_export_that_is_cut_short_is_refused_wherever_it_is_cut(toy: Subject, tmp_path: Path) -> None:
    path = exported(toy, tmp_path)
    data = path.read_bytes()
    with tarfile.open(path) as archive:
        ends = [member.offset_data + member.size for member in archive.getmembers()]
    cut = tmp_path / "cut.perdure"
    for length in [0, 1, 511, 512, *(end - 1 for end in ends), *ends[:-1]]:
        cut.write_bytes(data[:length])
        assert refused(cut), length


def rewritten(path: Path, out: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    with tarfile.open(path) as archive:
        parts = {
            member.name: file.read()
            for member in archive.getmembers()
            if (file := archive.extractfile(member)) is not None
        }
    change(parts)
    with tarfile.open(out, "w") as archive:
        for name, data in parts.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out


def test_parts_of_another_export_are_refused(toy: Subject, tmp_path: Path) -> None:
    """S2: whole files, but not those that the manifest names."""
    path = exported(toy, tmp_path)
    with talking(toy, tmp_path / "other") as talk:
        s = talk.session("bob")
        talk.say(s, "Something quite different, and of some length, to have a block or more of its own")
        other = s.export(tmp_path / "bob.perdure")
    theirs: dict[str, bytes] = {}
    rewritten(other, tmp_path / "x", theirs.update)
    for name in ("turns.jsonl", "blocks/0", "manifest.json"):

        def exchange(parts: dict[str, bytes], name: str = name) -> None:
            parts[name] = theirs[name]

        assert refused(rewritten(path, tmp_path / "mixed", exchange)), name

    def swap(parts: dict[str, bytes]) -> None:
        parts["blocks/0"], parts["blocks/1"] = parts["blocks/1"], parts["blocks/0"]

    def newer(parts: dict[str, bytes]) -> None:
        manifest = json.loads(parts["manifest.json"])
        manifest["format"] = 99
        parts["manifest.json"] = json.dumps(manifest).encode()

    assert refused(rewritten(path, tmp_path / "mixed", swap))
    with pytest.raises(IncompatibleStateError):
        read_export(rewritten(path, tmp_path / "mixed", newer))


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 4096, b"{}" * 600])
def test_what_is_no_export_is_refused(content: bytes, tmp_path: Path, toy: Subject) -> None:
    path = tmp_path / "x.perdure"
    path.write_bytes(content)
    with talking(toy, tmp_path / "to") as talk:
        with pytest.raises(CorruptStateError):
            talk.rt.sessions.import_(path)
        with pytest.raises(StoreError):
            talk.rt.sessions.import_(tmp_path / "missing")
        assert talk.rt.sessions.list() == []


def test_an_export_that_cannot_be_written_leaves_nothing(toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path / "from") as talk:
        s = talk.session("alice")
        talk.say(s, LONG)
        folder = tmp_path / "out"
        with pytest.raises(StoreError):
            s.export(folder / "alice.perdure")
        folder.mkdir()
        s.export(folder / "alice.perdure")
        assert [path.name for path in folder.iterdir()] == ["alice.perdure"]
        shutil.rmtree(folder)


def test_transcripts_for_people_and_programs(toy: Subject) -> None:
    with talking(toy) as talk:
        s = talk.session("alice", system="Be terse.")
        reply = talk.say(s, "Grüß Gott 🙂")
        lines = [json.loads(line) for line in s.transcript("jsonl").splitlines()]
        assert [(line["role"], line["content"]) for line in lines] == [
            ("system", "Be terse."),
            ("user", "Grüß Gott 🙂"),
            ("assistant", reply.text),
        ]
        assert s.transcript() == (
            "# alice\n\n**system**\n\nBe terse.\n\n**user**\n\nGrüß Gott 🙂\n\n"
            f"**assistant**\n\n{reply.text}\n"
        )


def test_a_turn_that_was_changed_or_moved_is_not_the_one_of_its_digest() -> None:
    turn = Turn(kind="turn", messages=(Message(role="user", content="Hi"),))
    written = turn.to_json()
    assert Turn.from_json(written, turn.before) == turn
    changed = {**written, "messages": [{"role": "user", "content": "Ho"}]}
    for value, before in ((changed, turn.before), (written, bytes(31) + b"x")):
        with pytest.raises(CorruptStateError, match="damaged, or put in another's place"):
            Turn.from_json(value, before)
