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
        ("worker/test_remote.py", "process"),
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
