"""Agents and SDKs from npm against a running server: one headless task each (soak).

What they send is theirs; what the model says is a script: it calls the first tool that can write a file, and
then says that it is done. The packages are installed once, under build/agents.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decode.observed import toy
from perdure import Runtime
from perdure.chat.message import Tool
from server.live_server import LiveServer, live_server, opened
from server.scripted import THINKS, saying

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"aarch64": "arm64", "x86_64": "x64"}.get(platform.machine(), platform.machine())
OPENCODE = f"opencode-{sys.platform}-{MACHINE}"
"""What `opencode-ai` fetches after it was installed, where scripts of packages may run."""
PACKAGES = {
    "codex": ("@openai/codex",),
    "claude": ("@anthropic-ai/claude-code",),
    "opencode": (OPENCODE,),
    "continue": ("@continuedev/cli",),
    "sdk": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
}
DONE = "All is done."
TASK = "Write the word sea into the file note.txt."
Script = Callable[[Sequence[Any], Sequence[Tool]], str]


def installed(name: str) -> Path:
    """The folder with an npm package, and its commands."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here")
    folder = ROOT / "build" / "agents" / name
    if not (folder / "node_modules" / PACKAGES[name][0]).exists():
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES[name]],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            pytest.skip(f"npm could not install {name}: {done.stderr[-300:]}")
    return folder / "node_modules"


@contextmanager
def served(script: Script, store: Path, **settings: Any) -> Iterator[LiveServer]:
    """A server whose model says what `script` makes of the messages and tools that it is shown."""
    with opened(toy(), n_ctx=1 << 20, store=store, template=THINKS, **settings) as rt:
        _follow(rt, script)
        with live_server(rt, aliases=("gpt-*", "claude-*", "toy*")) as server:
            yield server


def _follow(rt: Runtime, script: Script) -> None:
    plan = rt.chat_format.plan

    def scripted(messages: Sequence[Any], **settings: Any) -> Any:
        tools = [Tool.parse(tool) for tool in settings.get("tools") or ()]
        text = script([_plain(message) for message in messages], tools)
        return plan(messages, processors=(saying(text, rt.model),), **settings)

    rt.chat_format.plan = scripted  # type: ignore[method-assign]


def _plain(message: Any) -> Mapping[str, Any]:
    return message if isinstance(message, Mapping) else message.to_dict()


def writes_a_note(folder: Path) -> Script:
    """Calls a tool that writes the note, then says that it is done."""

    def script(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> str:
        if messages[-1]["role"] == "tool" or not tools:
            return DONE
        names = [tool.name for tool in tools]
        command = "echo sea > note.txt"
        ways: dict[str, dict[str, Any]] = {
            "exec_command": {"cmd": command},
            "shell_command": {"command": command},
            "shell": {"command": ["bash", "-lc", command]},
            "local_shell": {"command": ["bash", "-lc", command]},
            "Write": {"file_path": str(folder / "note.txt"), "content": "sea\n"},
            "write": {"filePath": str(folder / "note.txt"), "content": "sea\n"},
            "Bash": {"command": command, "description": "Write the note"},
            "bash": {"command": command, "description": "Write the note"},
        }
        for name, arguments in ways.items():
            if name in names:
                return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        return f"None of {names} can write."

    return script


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


def test_codex_does_a_task(folder: Path, tmp_path: Path) -> None:
    command = installed("codex") / ".bin" / "codex"
    with served(writes_a_note(folder), tmp_path / "store") as server:
        provider = f'{{name="perdure",base_url="{server.url}/v1",wire_api="responses"}}'
        said = run(
            [
                *(
                    str(command),
                    "exec",
                    "--skip-git-repo-check",
                    "--dangerously-bypass-approvals-and-sandbox",
                ),
                *("-m", "toy", "-c", 'model_provider="perdure"'),
                *("-c", f"model_providers.perdure={provider}", TASK),
            ],
            folder,
        )
    assert (folder / "note.txt").read_text() == "sea\n"
    assert DONE in said


def test_claude_code_does_a_task(folder: Path, tmp_path: Path) -> None:
    command = installed("claude") / ".bin" / "claude"
    with served(writes_a_note(folder), tmp_path / "store") as server:
        said = run(
            [str(command), "-p", TASK, "--allowedTools", "Write,Bash", "--permission-mode", "acceptEdits"],
            folder,
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_API_KEY="",
            ANTHROPIC_MODEL="claude-sonnet-local",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    assert (folder / "note.txt").read_text() == "sea\n"
    assert DONE in said


def test_opencode_does_a_task(folder: Path, tmp_path: Path) -> None:
    command = installed("opencode") / OPENCODE / "bin" / "opencode"
    with served(writes_a_note(folder), tmp_path / "store") as server:
        model = {"name": "toy", "limit": {"context": 1 << 20, "output": 4096}, "tool_call": True}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "perdure",
            "options": {"baseURL": f"{server.url}/v1", "apiKey": "none"},
            "models": {"toy": model},
        }
        config = {
            "$schema": "https://opencode.ai/config.json",
            "provider": {"perdure": provider},
            "model": "perdure/toy",
            "small_model": "perdure/toy",
            "permission": {"edit": "allow", "bash": "allow"},
            "autoupdate": False,
            "share": "disabled",
        }
        (folder / "opencode.json").write_text(json.dumps(config))
        said = run([str(command), "run", "-m", "perdure/toy", TASK], folder)
    assert (folder / "note.txt").read_text() == "sea\n"
    assert DONE in said


def test_continue_does_a_task(folder: Path, tmp_path: Path) -> None:
    """With the recipe's own block."""
    command = installed("continue") / ".bin" / "cn"
    recipe = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    config = recipe.partition("## Continue")[2].partition("```yaml\n")[2].partition("```")[0]
    write = {"name": "Write", "arguments": {"filepath": str(folder / "note.txt"), "content": "sea\n"}}

    def script(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> str:
        if messages[-1]["role"] == "tool" or not tools:
            return DONE
        return f"<tool_call>\n{json.dumps(write)}\n</tool_call>"

    with served(script, tmp_path / "store") as server:
        (tmp_path / "config.yaml").write_text(config.replace("http://127.0.0.1:8080", server.url))
        said = run(
            [str(command), "-p", "--auto", "--config", str(tmp_path / "config.yaml"), TASK],
            folder,
            CONTINUE_TELEMETRY_ENABLED="0",
        )
    assert (folder / "note.txt").read_text() == "sea\n"
    assert DONE in said


SDK = """
import { generateText, streamText, tool, stepCountIs } from "ai";
import { z } from "zod";
import { writeFileSync } from "node:fs";
const [kind, url, task, before] = process.argv.slice(2);
async function model() {
  if (kind === "anthropic") {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    return createAnthropic({ baseURL: url, apiKey: "none" })("claude-any");
  }
  if (kind === "compatible") {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    return createOpenAICompatible({ name: "perdure", baseURL: url, apiKey: "none" })("toy");
  }
  const { createOpenAI } = await import("@ai-sdk/openai");
  const provider = createOpenAI({ baseURL: url, apiKey: "none" });
  return kind === "responses" ? provider.responses("toy") : provider.chat("toy");
}
const write = tool({
  description: "Writes the note",
  inputSchema: z.object({ filePath: z.string(), content: z.string() }),
  execute: async ({ filePath, content }) => { writeFileSync(filePath, content); return "written"; },
});
const messages = [...(before ? JSON.parse(before) : []), { role: "user", content: task }];
const options = { model: await model(), tools: { write }, stopWhen: stepCountIs(4) };
const whole = await generateText({ ...options, messages });
const stream = streamText({ ...options, messages: [...messages, ...whole.response.messages,
  { role: "user", content: "Again." }] });
let text = "";
for await (const part of stream.textStream) text += part;
console.log(JSON.stringify({
  whole: whole.text, streamed: text, steps: whole.steps.length,
  messages: [...messages, ...whole.response.messages], usage: await stream.totalUsage,
}));
"""


@pytest.mark.parametrize("kind", ["responses", "chat", "compatible", "anthropic"])
def test_the_vercel_ai_sdk_over_a_restart(kind: str, folder: Path, tmp_path: Path) -> None:
    """Tools, whole and streamed; then a new server goes on with the same messages."""
    modules = installed("sdk")
    script = modules.parent / "sdk.mjs"
    script.write_text(SDK)
    before = ""
    for task in (TASK, "And once more."):
        with served(writes_a_note(folder), tmp_path / "store") as server:
            said = run(["node", str(script), kind, f"{server.url}/v1", task, before], folder)
        found = json.loads(said.splitlines()[-1])
        assert (found["whole"], found["streamed"], found["steps"]) == (DONE, DONE, 2)
        assert (folder / "note.txt").read_text() == "sea\n"
        (folder / "note.txt").unlink()
        before = json.dumps(found["messages"])
