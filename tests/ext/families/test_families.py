"""The families of the extension, and what a template of theirs is taken for without it."""

from __future__ import annotations

import logging

import pytest

from chat.templates.test_template import PUBLISHED
from perdure import InvalidInputError
from perdure.chat.formats import registry
from perdure.ext.families import EXTENSION


def test_every_family_stands_in_the_kernels_table_under_its_name() -> None:
    assert EXTENSION.families.keys() <= set(registry.names())
    for name in EXTENSION.families:
        assert registry.family(name).name == name


def test_without_it_a_template_is_of_the_next_family_that_it_shows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "by_name", lambda _: {})
    with caplog.at_level(logging.WARNING, "perdure.chat"):
        assert registry.detect(PUBLISHED["granite-3.3"]).name == "thinking"
    assert "is of the family granite, which needs perdure's extension 'families'" in caplog.text
    assert registry.detect(PUBLISHED["qwen-3"]).name == "qwen3"
    assert "granite" not in registry.names()
    with pytest.raises(InvalidInputError, match="there is no family 'granite'"):
        registry.family("granite")
