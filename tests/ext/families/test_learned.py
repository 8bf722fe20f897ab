"""The form of calls, learned from templates."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tools.template_tables import summary, table

from perdure import Template
from perdure.chat.formats.registry import detect
from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing.call_writer import CallForm
from perdure.decode.sampling.grammar import Grammars
from perdure.ext.families.learned import learn
from perdure.testing.toy import ToyModel

FOLDER = Path(__file__).parents[2] / "chat" / "templates"
LLAMA_CPP = sorted((FOLDER / "llama.cpp").glob("*.jinja"))
ALL = [*sorted(FOLDER.glob("*.jinja")), *LLAMA_CPP]
ONE_CALL = {
    *("gpt-oss", "openai-gpt-oss-120b", "llama-3.1", "llama-3.2", "meta-llama-Llama-3.1-8B-Instruct"),
    *("meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
    *("GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
}
"""Templates that write one call at most, or another end behind two; two are not asked for."""
OTHERWISE = {"CohereForAI-c4ai-command-r-plus-tool_use": "arguments over several lines; one is read, too"}
EXACT = [path for path in ALL if path.stem not in OTHERWISE]


@cache
def form(path: Path) -> CallForm:
    template = Template(path.read_text(), bos="<s>", eos="</s>")
    return learn(template, detect(template.source))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_forced_call_is_what_the_template_would_write_back(path: Path) -> None:
    """For one call and for two: by the template itself, or in the text of a message where it shows none."""
    found = form(path)
    if path.stem in OTHERWISE:
        assert not found.exact
        return
    assert found.exact
    assert found.parallel is (path.stem not in ONE_CALL)


def test_so_many_templates_are_exact() -> None:
    assert len(ALL) == 89
    assert [path for path in ALL if form(path).exact] == EXACT
    assert len(EXACT) == 88
    assert sum(form(path).parallel for path in ALL) == 78
    assert sum(form(path).parallel and form(path).shown for path in ALL) == 63
    assert sum(form(path).is_learned for path in ALL) >= 60
    assert {path.stem for path in ALL if not form(path).parallel} == ONE_CALL | OTHERWISE.keys()


@pytest.mark.parametrize("path", EXACT, ids=lambda path: path.stem)
def test_its_grammar_takes_what_its_writer_writes(path: Path) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
    tools = [Tool.parse({"name": name, "parameters": schema}) for name in ("weather", "stop")]
    arguments = ('{"city": "Söul", "n": 7}', '{"city": "a"}')
    beginning = "abcdefghi" if "Solar" in path.stem else "abcdefgh"
    calls = [
        ToolCall(id=f"{beginning}{index}", name=tool.name, arguments=arguments[index])
        for index, tool in enumerate(tools)
    ]
    found = form(path)
    for count in (1, 2)[: 1 + found.parallel]:
        matcher = Grammars(ToyModel()).matcher(found.writer.grammar(tools, parallel=count > 1, control={}))
        for byte in found.writer.write(calls[:count]).encode():
            matcher.mask()
            matcher.consume(byte)


def test_the_table_of_the_docs_is_what_the_command_makes() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "measurements" / "templates.md").read_text()
    assert table(LLAMA_CPP) in docs
    assert summary(ALL) in docs
