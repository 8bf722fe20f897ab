"""Markdown as it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cli.pty_user import plain
from perdure.cli.output.reply_view import Markdown

PAGE = """# A title

Some **bold text** and *italic*, `code x`, ***both*** and 2 * 3 * 4, 2**8 and snake_case.

- an item that is too long for the window, so that it goes on below
- **another**
  1. nested
> quoted words

```python
def f(x):
    return x * 2  # `no code`, **not bold**
```
| a | b |
|---|---|
---
한국어 é 🙂 **not closed
the end"""


def laid_out(text: str, width: int = 40) -> str:
    page = Markdown(width)
    return page.add(text) + page.finish()


def test_a_page_is_laid_out() -> None:
    assert plain(laid_out(PAGE)).splitlines() == [
        "A title",
        "",
        "Some bold text and italic, code x, both",
        "and 2 * 3 * 4, 2**8 and snake_case.",
        "",
        "• an item that is too long for the",
        "  window, so that it goes on below",
        "• another",
        "  1. nested",
        "│ quoted words",
        "",
        "```python",
        "def f(x):",
        "    return x * 2  # `no code`, **not bold**",
        "```",
        "| a | b |",
        "|---|---|",
        "─" * 40,
        "한국어 é 🙂 not closed",
        "the end",
    ]


@given(st.lists(st.integers(1, 12), max_size=120), st.integers(1, 60))
def test_it_does_not_matter_how_the_text_is_cut(lengths: list[int], width: int) -> None:
    """C9: in any chunking of the stream."""
    page, at, shown = Markdown(width), 0, ""
    for length in lengths:
        shown += page.add(PAGE[at : at + length])
        at += length
    assert shown + page.add(PAGE[at:]) + page.finish() == laid_out(PAGE, width)


@given(st.text("ab é한🙂\n", max_size=200), st.integers(1, 30))
def test_no_letter_is_lost_and_words_that_fit_stay_whole(text: str, width: int) -> None:
    shown = laid_out(text, width)
    assert shown.split() == text.split() or any(cell_len(word) >= width for word in text.split())
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.splitlines():
        assert cell_len(line.strip()) <= width or any(cell_len(word) >= width for word in line.split())


@given(st.text("*`#->1. \n~_|a", max_size=60))
def test_any_marks_end_without_a_style_left_on(text: str) -> None:
    shown = laid_out(text)
    styles = [part.split("m")[0] for part in shown.split("\x1b[")[1:]]
    assert not styles or styles[-1] == "0"
    assert not shown or shown.endswith("\n")


@pytest.mark.parametrize("text", ["a word", "**bo", "`co", "# ", "- ", "```\ncode"])
def test_what_is_held_back_comes_with_the_end(text: str) -> None:
    shown = plain(laid_out(text))
    assert shown.endswith("\n")
    assert shown.strip().endswith(text.strip("*`# -").split("\n")[-1])
