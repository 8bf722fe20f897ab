"""`/v1/responses/compact`: nothing of a conversation is left out of its summary without a word."""

from __future__ import annotations

from typing import Any

import pytest

from decode.observed import toy
from perdure import Runtime
from perdure.sessions.fold import HEADING
from server.live_server import live_server, opened
from server.scripted import THINKS, steer

PATH = "/v1/responses/compact"


def overheard(rt: Runtime) -> list[str]:
    """What the model is shown from now on, prompt by prompt."""
    found: list[str] = []
    submit = rt.chat_format.submit

    def heard(messages: Any, **settings: Any) -> Any:
        found.append("\n".join(f"{each.role}: {each.content}" for each in messages))
        return submit(messages, **settings)

    rt.chat_format.submit = heard  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("size", [40, 900])
def test_a_long_conversation_is_summed_up_in_passes_x21(size: int) -> None:
    """X21: the oldest part first, each summary into the next; messages that fit into no context, too."""
    said: list[dict[str, str]] = []
    for number in range(12):
        said.append({"role": "user", "content": f"fact-{number:02} " + "x" * size})
        said.append({"role": "assistant", "content": f"noted-{number:02}"})
    summaries = [f"Summary number {number}." for number in range(200)]
    with opened(toy(), n_ctx=512, template=THINKS) as rt:
        steer(rt, *summaries)
        shown = overheard(rt)
        with live_server(rt) as server, server.client() as client:
            answer = client.post(PATH, json={"input": said})
            assert answer.status_code == 200, answer.text
            compacted = answer.json()
            passes = len(shown)
            assert passes > 1
            sealed = compacted["output"][-1]["encrypted_content"]
            # The last summary, which is of everything.
            assert server.state.reasoning_cipher.decrypt(sealed, "") == f"{HEADING}\n{summaries[passes - 1]}"
    for number in range(12):
        assert any(f"fact-{number:02}" in prompt for prompt in shown)
        assert any(f"noted-{number:02}" in prompt for prompt in shown)
    assert sum(prompt.count("x") for prompt in shown) >= 12 * size
    for before, prompt in zip(summaries, shown[1:], strict=False):
        assert before in prompt
    assert compacted["usage"]["input_tokens"] > 512


def test_half_a_summary_is_none_x21() -> None:
    """X21: one that its limit ended would lose the rest of the conversation."""
    with opened(toy(), n_ctx=256, template=THINKS) as rt:
        steer(rt, "and so on " * 40)
        with live_server(rt) as server, server.client() as client:
            answer = client.post(PATH, json={"input": "The sea is wide."})
    assert answer.status_code == 500
    assert "not finished" in answer.json()["error"]["message"]
