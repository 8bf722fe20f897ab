"""Exports that were flipped, cut, spliced and made up: imported, or refused in words; nothing else."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure import PerdureError
from perdure.ext.upkeep.export import read_export, write_export
from perdure.sessions.turn import FIRST, Turn
from sessions.database import index_of
from sessions.talking import ASK, Talk, talking
from subjects import Subject

_TRIALS_A_STORE = 200
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**70,
    1e308,
    float("nan"),
    "",
    "\u2028",
    "\ud800",
    [],
    {},
    [[]],
    "x" * 5000,
    {"x": {"y": []}},
)


def exports(subject: Subject, folder: Path) -> list[bytes]:
    """Two of one store, with state and without, and one of another."""
    found = []
    for name in ("one", "other"):
        with talking(subject, folder / name) as talk:
            s = talk.session(name, system="Be terse.", seed=3)
            s.say(f"A message of {name} that is long enough to have a separate block, or even two", **ASK)
            s.say("And then?", **ASK)
            found.append(s.export(folder / f"{name}.perdure").read_bytes())
            found.append(s.export(folder / f"{name}.perdure", state=False).read_bytes())
    return found


def flipped(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    return data[: rng.randrange(len(data))]


def spliced(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    unit = rng.choice([1, 512])
    at, start = (rng.randrange(len(each) // unit) * unit for each in (data, other))
    return (
        data[:at]
        + other[start : start + rng.randrange(len(other))]
        + data[at if rng.random() < 0.5 else at + 512 :]
    )


def made_up(rng: random.Random, data: bytes, others: list[bytes], folder: Path) -> bytes:
    """Whole in itself, with fields that nobody would have written."""
    path = folder / "made up"
    path.write_bytes(data)
    export = read_export(path)
    turns: list[Turn] = []
    for turn in export.turns:
        values = turn.to_json()
        if rng.random() < 0.4:
            field = rng.choice([name for name in values if name != "digest"])
            values[field] = rng.choice([*ODD, values[rng.choice(list(values))]])
        before = turns[-1].digest if turns else FIRST
        try:
            made = _believed(values, before)
            json.dumps(made.to_json()).encode()
            turns.append(made)
        except (TypeError, ValueError, AttributeError, PerdureError, OverflowError, KeyError):
            turns.append(Turn(kind=turn.kind, messages=turn.messages, reply=turn.reply, before=before))
    packed = (export.identity, list(export.blocks())) if export.identity is not None else None
    settings = rng.choice([{}, {rng.choice(["seed", "stop", "tools", "n", "then", "x"]): rng.choice(ODD)}])
    name, kind = (rng.choice(["a", "a/b", *ODD]) if rng.random() < 0.3 else word for word in ("a", "session"))
    try:
        written = write_export(path, turns, packed, name=name, kind=kind, settings=settings)
    except (TypeError, ValueError, AttributeError):
        return data
    return written.read_bytes()


def _believed(values: dict[str, Any], before: bytes) -> Turn:
    """A turn as a stranger's program would make it: no checks but its digest."""
    from array import array

    from perdure.chat.message import Message
    from perdure.chat.transcript import Transcript

    return Turn(
        kind=values["kind"],
        messages=tuple(Message.parse(each) for each in values["messages"]),
        reply=None if values["reply"] is None else Message.parse(values["reply"]),
        keep=tuple(values["keep"]),
        added=Transcript(values["text"], array("i", values["tokens"]), tuple(map(tuple, values["cuts"]))),
        settings=values["settings"],
        seed=values["seed"],
        finish_reason=values["finish_reason"],
        usage=values["usage"],
        dropped=values["dropped"],
        model=values["model"],
        created=values["created"],
        before=before,
    )


def check(talk: Talk, path: Path, rng: random.Random) -> str:
    """What came of an import. A session that has come can be read, answers, shows what the model reads, and
    goes again."""
    sessions = talk.rt.sessions
    try:
        result = sessions.import_(path, rng.choice([None, "x"]), trust_state=rng.random() < 0.5)
    except PerdureError as error:
        assert sessions.list() == [], "a refused import leaves nothing"
        assert not index_of(sessions).rows("SELECT 1 FROM turn"), "not even turns"
        return f"refused: {type(error).__name__}"
    session = result.session
    session.history()
    for line in session.transcript("jsonl").split("\n")[:-1]:
        json.loads(line)
    try:
        assert session.say("Go on", max_tokens=2, temperature=0).kept
        kind = "imported whole" if not result.left_out else f"imported without {sorted(result.left_out)}"
        if "\ufffd" not in session.standing().transcript.text:
            text = talk.rt.model.detokenize(session.tokens, special=True)
            assert text == session.standing().transcript.text, "the model reads what people read"
    except PerdureError as error:
        kind = f"imported, and a turn is refused: {type(error).__name__}"
    sessions.delete(session.name)
    assert sessions.list() == []
    return kind


def fuzz(subject: Subject, folder: Path, *, trials: int, seconds: float = 1e9, seed: int = 0) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    originals = exports(subject, folder)
    ways: dict[str, Callable[[random.Random, bytes, list[bytes]], bytes]] = {
        "flipped": flipped,
        "cut": cut,
        "spliced": spliced,
        "made up": lambda rng, data, others: made_up(rng, data, others, folder),
    }
    end = time.monotonic() + seconds
    done = 0
    while done < trials and time.monotonic() < end:
        with talking(subject, folder / f"to {done}") as talk:
            for _ in range(min(_TRIALS_A_STORE, trials - done)):
                way = rng.choice(list(ways))
                path = folder / "hostile"
                path.write_bytes(ways[way](rng, rng.choice(originals), originals))
                try:
                    counts[f"{way}, {check(talk, path, rng)}"] += 1
                except BaseException:
                    (folder / "failing").write_bytes(path.read_bytes())
                    print(f"trial {done}, {way}: kept as {folder / 'failing'}")
                    raise
                done += 1
    counts["trials"] = done
    return counts
