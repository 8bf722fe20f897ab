"""Writes the tables of docs/server.md that say which client can do what: every cell names the test behind it.

`python tools/client_table.py` writes them; a test compares the page with what it would write, and looks for
every test that is named.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "server.md"
BEGIN, END = "<!-- tools/client_table.py -->\n", "<!-- end -->\n"

NONE = "–"
"""Not in the protocol."""

CHAT, ANTHROPIC, OLLAMA = (
    "peers/test_openai_client.py",
    "peers/test_anthropic_client.py",
    "peers/test_ollama_client.py",
)
RESPONSES, FRAMEWORKS, AGENTS = (
    "peers/test_openai_responses.py",
    "peers/test_frameworks.py",
    "peers/test_agents.py",
)

Cell = str | tuple[str, str]
"""What a cell says and the test behind it; or what it says where the protocol has nothing to be tested."""

CLIENTS = ("openai: chat", "openai: Responses", "anthropic", "ollama")
FEATURES: dict[str, tuple[Cell, Cell, Cell, Cell]] = {
    "whole, streamed": (
        ("yes", f"{CHAT}::test_a_stream_with_usage"),
        ("yes", f"{RESPONSES}::test_its_stream_helper"),
        ("yes", f"{ANTHROPIC}::test_a_stream_says_the_same_as_the_whole"),
        ("yes", f"{OLLAMA}::test_a_chat_whole_and_streamed"),
    ),
    "tools and their results": (
        ("yes", f"{CHAT}::test_tools"),
        ("yes, custom ones too", f"{RESPONSES}::test_custom_tools_and_namespaces"),
        ("yes", f"{ANTHROPIC}::test_tools_and_their_results"),
        ("yes", "ext/ollama/test_ollama.py::test_thinking_and_calls_have_their_own_fields_and_come_back"),
    ),
    "a tool that must be called": (
        ("yes", "server/test_chat.py::test_a_tool_that_is_required_is_called"),
        ("yes", f"{RESPONSES}::test_a_tool_that_must_be_called"),
        ("yes", f"{ANTHROPIC}::test_tools_and_their_results"),
        NONE,
    ),
    "structured output": (
        ("yes", f"{CHAT}::test_an_answer_that_parses_into_a_class"),
        ("yes", f"{RESPONSES}::test_an_answer_that_parses_into_a_class"),
        ("yes", f"{ANTHROPIC}::test_structured_output"),
        ("yes", f"{OLLAMA}::test_a_format_and_thinking_are_taken"),
    ),
    "reasoning sent back as it was": (
        ("as text", "server/test_chat.py::test_usage_counts_the_tokens_of_reasoning_h6"),
        ("sealed", f"{RESPONSES}::test_items_by_reference_and_reasoning_that_is_echoed"),
        ("sealed", "ext/messages/test_messages.py::test_thinking_comes_back_as_it_was_by_its_signature"),
        ("as text", "ext/ollama/test_ollama.py::test_thinking_and_calls_have_their_own_fields_and_come_back"),
    ),
    "a reply that is begun by the caller": (
        (
            "`continue_final_message`",
            "server/test_chat.py::test_a_last_message_of_the_assistant_is_continued",
        ),
        NONE,
        (
            "yes",
            "ext/messages/test_messages.py::test_a_last_message_of_the_assistant_is_the_beginning_of_the_reply",
        ),
        (
            "yes",
            "ext/ollama/test_ollama.py::test_a_last_message_of_the_assistant_is_the_beginning_of_the_reply",
        ),
    ),
    "stop sequences": (
        ("yes", "server/test_chat.py::test_a_stop_text_ends_a_reply_and_does_not_show"),
        NONE,
        ("yes, named", f"{ANTHROPIC}::test_a_stop_sequence_is_named"),
        ("yes", f"{OLLAMA}::test_num_ctx_is_clamped_and_told_and_options_are_mapped_or_refused"),
    ),
    "log probabilities": (
        ("yes", f"{CHAT}::test_log_probabilities"),
        ("yes", f"{RESPONSES}::test_log_probabilities"),
        NONE,
        "no",
    ),
    "usage with cached tokens": (
        ("yes", "server/test_chat.py::test_usage_counts_real_tokens_h6"),
        ("yes", f"{RESPONSES}::test_a_conversation_with_tools_over_a_restart_costs_only_what_is_new_h9"),
        ("yes", f"{ANTHROPIC}::test_usage_counts_real_tokens_and_what_was_cached_h6"),
        ("in `perdure.reuse`", "server/test_waiting.py::test_a_retry_goes_on_where_the_first_one_was"),
    ),
    "cache marks": (
        ("breakpoints, key", "server/test_cache_marks.py::test_keys_and_breakpoints_of_openai_keep_a_prompt"),
        ("breakpoints, key", "server/test_cache_marks.py::test_keys_and_breakpoints_of_openai_keep_a_prompt"),
        ("`cache_control`", "server/test_cache_marks.py::test_creation_and_read_figures_are_what_happened"),
        NONE,
    ),
    "stored, continued by id, branched": (
        ("by `perdure.session`", f"{CHAT}::test_the_extension_travels_in_extra_body"),
        ("yes", f"{RESPONSES}::test_branches_from_any_earlier_response"),
        (
            "by `perdure.session`",
            "server/test_branches.py::test_a_branch_may_be_named_and_is_then_gone_on_with",
        ),
        (
            "by `perdure.session`",
            "server/test_branches.py::test_a_branch_may_be_named_and_is_then_gone_on_with",
        ),
    ),
    "resumed after a break or a kill": (
        (
            "`perdure.resumable`",
            "ext/cluster/test_streams.py::test_a_chat_stream_of_a_killed_replica_goes_on_at_another_one",
        ),
        (
            "yes",
            "ext/responses/test_response_kills.py::test_killing_the_server_between_two_events_loses_nothing_h9",
        ),
        NONE,
        NONE,
    ),
    "in the background": (NONE, ("yes", f"{RESPONSES}::test_in_the_background_with_polling"), NONE, NONE),
    "over a WebSocket": (
        NONE,
        ("yes", "peers/test_responses_websocket.py::test_its_client_over_a_websocket"),
        NONE,
        NONE,
    ),
    "made shorter by a summary": (
        NONE,
        ("yes", f"{RESPONSES}::test_a_conversation_that_is_made_shorter_goes_on_from_its_summary"),
        NONE,
        NONE,
    ),
    "embeddings": (("yes", f"{CHAT}::test_embeddings"), NONE, NONE, ("yes", f"{OLLAMA}::test_embeddings")),
    "signs of life while a prompt is read": (
        ("empty chunks", "server/test_waiting.py::test_it_is_told_how_far_a_prompt_is_read"),
        ("`response.in_progress`", "server/test_waiting.py::test_it_is_told_how_far_a_prompt_is_read"),
        ("`ping`", "server/test_waiting.py::test_it_is_told_how_far_a_prompt_is_read"),
        ("empty lines", "server/test_waiting.py::test_it_is_told_how_far_a_prompt_is_read"),
    ),
    "too long": (
        ("400", "server/test_chat.py::test_too_long_is_400_before_any_work_c3"),
        (
            "400, `response.failed`",
            "ext/responses/test_responses.py::test_a_full_context_is_told_within_the_stream",
        ),
        ("400, its words", "ext/messages/test_messages.py::test_a_full_context_says_so_instead_of_being_cut"),
        ("400", f"{OLLAMA}::test_what_does_not_fit_is_an_error_and_never_cut"),
    ),
}

OTHERS = ("speaks", "tools", "streamed", "over a restart")
FRAMEWORK_FEATURES: dict[str, tuple[Cell, Cell, Cell, Cell]] = {
    "langchain": (
        ("chat, Responses, Messages, Ollama", f"{FRAMEWORKS}::test_langchain"),
        ("yes", f"{FRAMEWORKS}::test_langchain"),
        ("yes", f"{FRAMEWORKS}::test_langchain"),
        ("yes", f"{FRAMEWORKS}::test_langchain"),
    ),
    "litellm": (
        ("chat, Messages, Ollama", f"{FRAMEWORKS}::test_litellm"),
        ("yes", f"{FRAMEWORKS}::test_litellm"),
        ("yes", f"{FRAMEWORKS}::test_litellm"),
        ("yes", f"{FRAMEWORKS}::test_litellm"),
    ),
    "llama-index": (
        ("chat, Ollama", f"{FRAMEWORKS}::test_llama_index"),
        ("yes", f"{FRAMEWORKS}::test_llama_index"),
        ("yes", f"{FRAMEWORKS}::test_llama_index"),
        ("yes", f"{FRAMEWORKS}::test_llama_index"),
    ),
    "pydantic-ai": (
        ("chat, Responses", f"{FRAMEWORKS}::test_pydantic_ai"),
        ("yes", f"{FRAMEWORKS}::test_pydantic_ai"),
        NONE,
        ("yes", f"{FRAMEWORKS}::test_pydantic_ai"),
    ),
    "instructor": (
        ("chat", f"{FRAMEWORKS}::test_instructor"),
        ("a schema", f"{FRAMEWORKS}::test_instructor"),
        NONE,
        NONE,
    ),
    "Vercel AI SDK": (
        ("chat, Responses, Messages", f"{AGENTS}::test_the_vercel_ai_sdk_over_a_restart"),
        ("yes", f"{AGENTS}::test_the_vercel_ai_sdk_over_a_restart"),
        ("yes", f"{AGENTS}::test_the_vercel_ai_sdk_over_a_restart"),
        ("yes", f"{AGENTS}::test_the_vercel_ai_sdk_over_a_restart"),
    ),
    "Codex": (
        ("Responses", f"{AGENTS}::test_codex_does_a_task"),
        ("a task", f"{AGENTS}::test_codex_does_a_task"),
        ("yes", f"{AGENTS}::test_codex_does_a_task"),
        NONE,
    ),
    "Claude Code": (
        ("Messages", f"{AGENTS}::test_claude_code_does_a_task"),
        ("a task", f"{AGENTS}::test_claude_code_does_a_task"),
        ("yes", f"{AGENTS}::test_claude_code_does_a_task"),
        NONE,
    ),
    "opencode": (
        ("chat", f"{AGENTS}::test_opencode_does_a_task"),
        ("a task", f"{AGENTS}::test_opencode_does_a_task"),
        ("yes", f"{AGENTS}::test_opencode_does_a_task"),
        NONE,
    ),
}


def tables() -> str:
    """Both tables, and what stands behind them."""
    return "\n".join(
        [
            *_table("", CLIENTS, FEATURES),
            "",
            *_table("", OTHERS, FRAMEWORK_FEATURES),
            "",
            f"{NONE} is not in the protocol, or not tested. The tests are in `tests/peers`, "
            "`tests/server` and `tests/ext`; those of the second table run in `make soak`.",
            "",
        ]
    )


def _table(corner: str, heads: tuple[str, ...], rows: dict[str, tuple[Cell, Cell, Cell, Cell]]) -> list[str]:
    lines = [f"| {corner} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, cells in rows.items():
        lines.append(f"| {name} | {' | '.join(_said(cell) for cell in cells)} |")
    return lines


def _said(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def missing() -> list[str]:
    """Tests that are named here, and are none."""
    named = {
        cell[1]
        for rows in (FEATURES, FRAMEWORK_FEATURES)
        for cells in rows.values()
        for cell in cells
        if cell[1:] and not isinstance(cell, str)
    }
    return sorted(each for each in named if not _exists(*each.split("::")))


def _exists(path: str, name: str) -> bool:
    return name in _names(path)


@cache
def _names(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def page() -> str:
    """docs/server.md with the tables as they are now."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    if absent := missing():
        sys.exit(f"there are no such tests: {', '.join(absent)}")
    if "--check" in sys.argv:
        sys.exit(None if page() == PAGE.read_text(encoding="utf-8") else "run `python tools/client_table.py`")
    PAGE.write_text(page(), encoding="utf-8")
