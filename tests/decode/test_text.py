"""Text out of pieces: any Unicode in any chunking (C9), and stop strings that never leak."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure import InvalidInputError
from perdure.decode import stops as stops_module
from perdure.decode.request import Request
from perdure.decode.stops import TextStream

HARD = "é 한국어 각 🙂 👩‍👩‍👧‍👦 🇳🇱 e\u0301 \u200b ffi \x00 \ufffd \r\n"
TWO_LETTERS = st.text(alphabet="ab", max_size=40)


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    """`data` cut at these places, which may fall within characters."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return (data[start:end] for start, end in pairwise(places))


def stream(stops: Sequence[str], chunks: Iterator[bytes]) -> tuple[list[str], TextStream]:
    """What comes out, the held end included, until a stop or the end."""
    text = TextStream(stops)
    out = []
    for chunk in chunks:
        out.append(text.push(chunk))
        if text.stopped is not None:
            break
    return [*out, text.finish()], text


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop that is complete first begins, and which: the plain and slow way."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@given(text=st.text(), cuts=st.lists(st.integers(0, 1000), max_size=60))
@example(text=HARD, cuts=list(range(len(HARD.encode()))))
def test_any_text_survives_any_cutting_into_pieces(text: str, cuts: list[int]) -> None:
    """C9"""
    out, _ = stream([], pieces(text.encode(), cuts))
    assert "".join(out) == text


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=60))
def test_bytes_that_are_no_text_come_out_alike_in_any_cutting(data: bytes, cuts: list[int]) -> None:
    """C9"""
    out, _ = stream([], pieces(data, cuts))
    assert "".join(out) == data.decode("utf-8", "replace")


def test_a_character_shows_with_its_last_byte_and_not_before() -> None:
    text = TextStream()
    assert [text.push(bytes([byte])) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    assert text.finish() == ""


@given(
    text=TWO_LETTERS,
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 200), max_size=40),
)
@example(text="aab", stops=["ab"], cuts=[1, 2])
@example(text="abcabcabd"[:9], stops=["abcabd"], cuts=[6])
@example(text="abab", stops=["abab", "ba"], cuts=[])
def test_the_text_is_cut_at_the_first_stop_whatever_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected = first_stop(text, stops)
    out, done = stream(stops, pieces(text.encode(), cuts))
    if expected is None:
        assert (done.stopped, "".join(out)) == (None, text)
    else:
        assert (done.stopped, "".join(out)) == (expected[1], text[: expected[0]])


@given(
    text=st.text(alphabet="é한🙂a", max_size=30),
    stops=st.lists(st.text(alphabet="é한🙂a", min_size=1, max_size=3), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 200), max_size=40),
)
@example(text="aé한", stops=["é한"], cuts=[3])
def test_no_part_of_a_stop_is_ever_seen_before_it_is_complete(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected = first_stop(text, stops)
    visible = text if expected is None else text[: expected[0]]
    seen = ""
    for part in stream(stops, pieces(text.encode(), cuts))[0]:
        seen += part
        assert visible.startswith(seen)


@given(text=TWO_LETTERS, cuts=st.lists(st.integers(0, 200), max_size=40))
def test_no_more_is_held_back_than_could_start_a_stop(text: str, cuts: list[int]) -> None:
    stops = ["abba", "bbb"]
    live = TextStream(stops)
    seen = whole = ""
    for piece in pieces(text.encode(), cuts):
        whole += piece.decode()
        seen += live.push(piece)
        if live.stopped is not None:
            return
        held = whole[len(seen) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_each_character_is_read_once_by_each_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant work a piece: nothing that was read is read again, however long the reply gets."""
    read: list[int] = []
    read_by = stops_module.advance

    def counting(stop: str, borders: tuple[int, ...], matched: int, text: str) -> tuple[int | None, int]:
        read.append(len(text))
        return read_by(stop, borders, matched, text)

    monkeypatch.setattr(stops_module, "advance", counting)
    live = TextStream(["aaab", "aa" + "x" * 48])
    seen = 0
    for pushed in range(1, 5001):
        seen += len(live.push(b"aaa"))
        assert 3 * pushed - seen < 50
    assert sum(read) == 2 * 3 * 5000
    assert max(read) == 3


def test_a_very_long_stop_costs_no_more_a_piece_than_a_short_one() -> None:
    live = TextStream(["a" * 200_000 + "b"])
    for _ in range(1000):
        assert live.push(b"aaac") == "aaac"


def test_a_stop_matches_no_part_of_a_control_tokens_mark_y27() -> None:
    """Y27: a torn mark is never shown; a stop that is the whole mark still ends the reply before it."""
    live = TextStream(["call>", "a<tool", "b>"])
    assert live.push(b"a") == ""
    assert live.push_mark(b"<tool_call>") == "a<tool_call>"
    assert live.push(b"b") == ""
    assert live.push_mark(b"</tool_call>") == "b</tool_call>"
    assert (live.stopped, live.push(b"call>"), live.stopped) == (None, "", "call>")
    whole = TextStream(["</think>"])
    assert (whole.push(b"so<"), whole.push_mark(b"</think>"), whole.stopped) == ("so", "<", "</think>")
    assert whole.finish() == ""


def test_a_stop_in_the_middle_of_a_piece_hides_what_follows_it() -> None:
    live = TextStream(["END"])
    assert live.push(b"one END two") == "one "
    assert live.stopped == "END"
    assert live.push(b"three") == ""
    assert live.finish() == ""


def test_what_was_held_back_is_given_when_no_more_will_come() -> None:
    live = TextStream(["END"])
    assert live.push(b"so E") == "so "
    assert live.push(b"N") == ""
    assert live.finish() == "EN"


def test_half_a_character_at_the_end_is_shown_as_the_replacement_mark() -> None:
    live = TextStream(["\ufffd!"])
    assert live.push("a🙂".encode()[:-1]) == "a"
    assert live.finish() == "\ufffd"


@pytest.mark.parametrize("stops", ["END", [""], ["a", ""], [None], [b"a"], [1]])
def test_stops_that_are_no_texts_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="stop"):
        Request(prompt=[1], stops=stops)


def test_x9_stops_are_bounded_in_number_and_length() -> None:
    """X9: stops of any length and number cost every stream of the engine."""
    assert Request(prompt=[1], stops=["x" * 1024] * 64).stops
    for stops in (["x"] * 65, ["x" * 1025]):
        with pytest.raises(InvalidInputError, match="at most 64 texts of at most 1,024 characters"):
            Request(prompt=[1], stops=stops)


def test_x9_what_is_kept_of_stops_is_bounded_in_bytes() -> None:
    """X9: the tables of stops that were once used stay, and stay small."""
    tracemalloc.start()
    for seed in range(2000):
        TextStream([f"{seed:04}" + "ab" * 510])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4 << 20
