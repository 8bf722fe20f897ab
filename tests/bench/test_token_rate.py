"""A rate does not depend on who reads a step's tokens first."""

from __future__ import annotations

import pytest
from bench.harness import tokens_a_second


def came(streams: int, steps: int, *, late: float = 0.001, later: int = 0) -> list[list[float]]:
    """One token a stream and step of 0.1 s, read one after the other; the last stream starts `later` steps
    after the others."""
    first = [later * (stream == streams - 1) for stream in range(streams)]
    return [
        [0.1 * (step + first[stream]) + late * stream for step in range(steps)] for stream in range(streams)
    ]


@pytest.mark.parametrize("streams", [1, 4, 64])
@pytest.mark.parametrize("later", [0, 3])
def test_a_step_counts_whole_whoever_is_told_of_it_last(streams: int, later: int) -> None:
    assert tokens_a_second(came(streams, 20, later=later)) == pytest.approx(10 * streams)


def test_tokens_that_come_two_at_a_time_count_as_two() -> None:
    assert tokens_a_second([[0, 0.1, 0.1, 0.2, 0.2], [0, 0.1, 0.1, 0.2, 0.2]]) == pytest.approx(40)


def test_replies_that_were_never_written_together_count_in_all() -> None:
    assert tokens_a_second([[0.0, 1.0], [2.0, 3.0]]) == pytest.approx(1.0)
