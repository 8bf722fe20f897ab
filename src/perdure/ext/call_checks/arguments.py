"""Arguments of tool calls: whether they fit what their tool's schema says."""

from __future__ import annotations

from collections.abc import Iterable

from perdure import InvalidInputError, Tool, ToolCall


def check_arguments(call: ToolCall, tools: Iterable[Tool]) -> str | None:
    """What is wrong with a call, by its tool's schema, in a sentence; None if nothing is."""
    known = {tool.name: tool for tool in tools}
    tool = known.get(call.name)
    if tool is None:
        return f"there is no tool {call.name!r}; the tools are: {', '.join(known) or 'none'}"
    try:
        arguments = call.parsed
    except InvalidInputError as error:
        return str(error)
    # Slow to import, and needed only where there are calls.
    from perdure.ext.call_checks.schema import first_problem

    try:
        problem = first_problem(tool.parameters, arguments)
    except Exception as error:
        # A tool's schema is its author's; what fails in it is not the model's fault.
        return f"the schema of {tool.name} cannot be used: {_brief(str(error))}"
    if problem is None:
        return None
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem.absolute_path)
    return f"the arguments of {call.name} do not fit its schema: arguments{place}: {_brief(problem.message)}"


def _brief(words: str, longest: int = 300) -> str:
    return words if len(words) <= longest else words[:longest] + " …"
