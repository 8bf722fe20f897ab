"""Templates are somebody else's code: they end in an error, soon, and take nothing along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chat.templates.hostile import HOSTILE
from perdure import TemplateError
from perdure.chat.message import Message
from perdure.chat.template import limits, sandbox
from perdure.chat.template.template import Template

MESSAGES = [Message(role="user", content="Hi")]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """All of them, in a process that may not have much memory, and is woken where it hangs."""
    child = [sys.executable, str(Path(__file__).parent / "hostile.py")]
    done = subprocess.run(child, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name: str, report: dict[str, Any]) -> None:
    assert report["outcomes"][name] == "refused"


def test_the_limit_of_every_day_ends_a_template_without_end_i2() -> None:
    """I2: the others are rendered with a shorter one, to save time."""
    with pytest.raises(TemplateError, match=r"takes longer than 1\.5 seconds to render"):
        Template(HOSTILE["nested loops"]).render(MESSAGES)


def test_hostile_templates_take_little_memory(report: dict[str, Any]) -> None:
    assert report["megabytes"] < 700


def test_a_refusal_leaves_the_next_rendering_alone() -> None:
    with pytest.raises(TemplateError):
        Template(HOSTILE["doubled by plus"]).render(MESSAGES)
    assert Template("{{ messages[0].content }}").render(MESSAGES) == "Hi"


@pytest.mark.parametrize("grown", ["ns.x ~ ns.x", "ns.x + ns.x", "'' + ns.x + ns.x"])
def test_without_their_limits_templates_would_go_on(grown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks have teeth: with limits far away, what was refused is rendered."""
    source = f"{{% set ns = namespace(x='x') %}}{{% for a in range(23) %}}{{% set ns.x = {grown} %}}"
    source += "{% endfor %}ok"
    with pytest.raises(TemplateError, match=r"makes a value of \d+ characters"):
        Template(source).render(MESSAGES)
    monkeypatch.setattr(limits, "_LARGEST", 1 << 30)
    monkeypatch.setattr(limits, "_CHARACTERS", 1 << 30)
    assert Template(source).render(MESSAGES) == "ok"


def test_without_its_list_of_methods_the_sandbox_would_let_more_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = "{{ (1).to_bytes(3, 'big') | length }}"
    with pytest.raises(TemplateError, match="unsafe"):
        Template(source).render(MESSAGES)
    monkeypatch.setattr(sandbox, "_METHODS", {})
    assert Template(source).render(MESSAGES) == "3"


def test_long_conversations_are_no_attack() -> None:
    """What may be used grows with what there is to render."""
    turn = [Message(role="user", content="x" * 50_000), Message(role="assistant", content="y" * 50_000)]
    messages = [*turn * 200, *MESSAGES]
    text = Template.named("chatml").render(messages)
    assert len(text) > 400 * 50_000
    gathered = (
        "{% set ns = namespace(l=[], t='') %}{% for m in messages %}{% set ns.l = ns.l + [m] %}"
        "{% set ns.t = m.content %}{% endfor %}{{ ns.l | length }}{{ messages[1:] | length }}"
    )
    assert Template(gathered).render(messages) == "401400"
