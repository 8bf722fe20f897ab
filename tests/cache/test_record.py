"""Labelled prefixes: limits, and clearing that costs what it clears."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perdure import InvalidInputError, StoreFullError
from perdure.cache.kept_prefixes import LABEL_LENGTH, LABELS
from perdure.cache.tiers.tiered import Tiers
from subjects import Subject

from .served import Served


def test_c6_a_namespace_keeps_no_more_records_than_its_limit(toy: Subject) -> None:
    """C6: the one too many is refused before anything is computed for it."""
    with Served(toy) as served:
        served.slot_cache.kept.limit = 3
        for number in range(3):
            served.cache.warm(toy.tokens(20, number), labels="a")
        with served.counting() as count, pytest.raises(StoreFullError, match="3 may be"):
            served.cache.warm(toy.tokens(20, 9), labels="a")
        assert count() == 0
        # Another label for one that is there is none too many, nor is another's record.
        served.cache.warm(toy.tokens(20, 1), labels="b")
        served.cache.warm(toy.tokens(20, 1), namespace="other")
        assert served.cache.clear("b") == 1
        served.cache.warm(toy.tokens(20, 9), labels="a")


def test_c6_records_keep_to_a_budget_of_bytes(toy: Subject) -> None:
    with Served(toy) as served:
        served.slot_cache.kept.budget = 5_000
        served.cache.warm(toy.tokens(20))
        with pytest.raises(StoreFullError, match="5000 may be used"):
            served.cache.warm(toy.tokens(100, 1))
        before = served.cache.stats().record_bytes
        assert 0 < before <= 5_000
        served.cache.clear([], namespace="nobody")
        assert served.cache.stats().record_bytes == before
        served.cache.clear()
        assert served.cache.stats().record_bytes == 0


@pytest.mark.parametrize("labels", [["x" * (LABEL_LENGTH + 1)], [str(n) for n in range(LABELS + 1)]])
def test_c6_labels_have_a_size(labels: list[str], toy: Subject) -> None:
    with Served(toy) as served, pytest.raises(InvalidInputError, match="labels of"):
        served.cache.warm(toy.tokens(9), labels=labels)


def test_c6_clearing_a_label_looks_at_what_it_clears_and_not_at_all_others(
    toy: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    children = Tiers.children

    def counted(self: Tiers, *args: Any, **options: Any) -> Iterator[Any]:
        nonlocal looks
        for entry in children(self, *args, **options):
            looks += 1
            yield entry

    monkeypatch.setattr(Tiers, "children", counted)
    taken = []
    for others in (8, 64):
        with Served(toy, n_ctx=64, n_batch=64) as served:
            for number in range(others):
                served.cache.warm(toy.tokens(24, number), labels="other")
            for number in range(4):
                served.cache.warm([*toy.tokens(16, 0), *toy.tokens(8, 100 + number)], labels="gone")
            looks = 0
            assert served.cache.clear("gone") == 4
            taken.append(looks)
            assert len(served.cache.records()) == others
            assert served.say([*toy.tokens(24, 0), *toy.tokens(3, 5)]).reused == 24
            gone = served.say([*toy.tokens(16, 0), *toy.tokens(8, 100), *toy.tokens(3, 5)])
            assert gone.reused < 24
    assert taken[1] <= taken[0] + 8
