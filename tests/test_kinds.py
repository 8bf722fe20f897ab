"""What a test starts is told by its file: a sample of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

import kinds

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("chat/test_message.py", None),
        ("chat/parsing/test_reply_parser.py", None),
        ("server/test_chat.py", "live"),
        ("cli/test_run.py", "process"),
        ("ext/workers/test_remote.py", "process"),
        ("ext/cluster/test_postgres.py", "service"),
        ("page/conftest.py", "browser"),
    ],
)
def test_a_file_starts_what_it_imports(file: str, kind: str | None) -> None:
    started = kinds.of_file(TESTS / file)
    assert max(started, key=kinds.KINDS.index, default=None) == kind


def test_every_test_has_one_kind(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len({mark.name for mark in item.iter_markers()} & set(kinds.KINDS)) == 1, item.nodeid


def test_each_fifth_case_of_many_runs_at_once_and_none_is_left_out(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    many = [item for item in items if "test_one_of_many" in item.name]
    if len(many) < len(CASES):
        pytest.skip("only when all of this file is collected")
    now = [item.callspec.params["case"] for item in many if not item.get_closest_marker("full")]
    assert now == [case for case in CASES if case % kinds.EVERY == 0]


CASES = range(kinds.MANY + 3)


@pytest.mark.parametrize("case", CASES)
def test_one_of_many(case: int) -> None:
    assert case in CASES
