"""`perdure launch CLIENT [-- ARGS]`: start an agent with the settings that it needs for a server here.

    claude      ANTHROPIC_BASE_URL=http://127.0.0.1:8000 … claude
    codex       codex -c model_providers.perdure.base_url=http://127.0.0.1:8000/v1 …

Settings go into the client's environment and arguments. Clients that read a file only get one in a folder of
perdure's own; no file of the user's is changed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure import InvalidInputError, PerdureError
from perdure.ext.agents.agent_process import ReadingInTitle, run_agent
from perdure.spi.base import processes, settings
from perdure.spi.cli import Key, Url, ask, current, private, terminal

_NO_KEY = "none"
"""What clients that insist on a key get where the server needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, as clients need to know it."""

    url: str
    key: str
    model: str
    n_ctx: int
    folder: Path
    """Perdure's own, for the files of the client."""

    @property
    def openai(self) -> str:
        return f"{self.url}/v1"

    @property
    def reply(self) -> int:
        """Tokens of a reply that leave room for a prompt."""
        return max(256, min(8192, self.n_ctx // 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSetup:
    """What a client is started with."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    """JSON, by path in the folder of perdure's own."""
    inside: bool = False
    """Whether it is started in that folder: it leaves a file where it is started."""


def _claude(to: Target) -> LaunchSetup:
    window = str(to.n_ctx)
    return LaunchSetup(
        command=("claude",),
        environment={
            "ANTHROPIC_BASE_URL": to.url,
            "ANTHROPIC_AUTH_TOKEN": to.key,
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_MODEL": to.model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": to.model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": to.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": to.model,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": window,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.reply),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # What would change its prompt at every turn or start.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
            "API_TIMEOUT_MS": "3600000",
        },
    )


def _codex(to: Target) -> LaunchSetup:
    provider = "model_providers.perdure"
    settings = {
        "model_provider": "perdure",
        f"{provider}.name": "perdure",
        f"{provider}.base_url": to.openai,
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "PERDURE_KEY",
        "model_context_window": to.n_ctx,
        "model_auto_compact_token_limit": to.n_ctx * 9 // 10,
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return LaunchSetup(command=("codex", *options, "-m", to.model), environment={"PERDURE_KEY": to.key})


def _opencode(to: Target) -> LaunchSetup:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "perdure",
        "options": {"baseURL": to.openai, "apiKey": to.key},
        "models": {to.model: {"name": to.model, "limit": {"context": to.n_ctx, "output": to.reply}}},
    }
    name = f"perdure/{to.model}"
    config = {"provider": {"perdure": provider}, "model": name, "small_model": name}
    return LaunchSetup(command=("opencode",), environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _pi(to: Target) -> LaunchSetup:
    model = {"id": to.model, "name": to.model, "contextWindow": to.n_ctx, "maxTokens": to.reply}
    provider = {"baseUrl": to.openai, "apiKey": to.key, "api": "openai-completions", "models": [model]}
    return LaunchSetup(
        command=("pi", "--provider", "perdure", "--model", to.model),
        environment={"PI_CODING_AGENT_DIR": str(to.folder)},
        files={"models.json": {"providers": {"perdure": provider}}},
    )


def _aider(to: Target) -> LaunchSetup:
    name, file = f"openai/{to.model}", "models.json"
    about = {
        "max_input_tokens": to.n_ctx,
        "max_output_tokens": to.reply,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return LaunchSetup(
        command=(
            *("aider", "--model", name, "--no-show-model-warnings"),
            *("--model-metadata-file", str(to.folder / file)),
        ),
        environment={"OPENAI_API_BASE": to.openai, "OPENAI_API_KEY": to.key},
        files={file: {name: about}},
    )


def _qwen(to: Target) -> LaunchSetup:
    return LaunchSetup(
        command=("qwen", "--auth-type", "openai"),
        environment={
            "OPENAI_BASE_URL": to.openai,
            "OPENAI_API_KEY": to.key,
            "OPENAI_MODEL": to.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(to.reply),
            # Defaults, which a person's own settings go before.
            "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(to.folder / "settings.json"),
        },
        files={"settings.json": {"model": {"generationConfig": {"contextWindowSize": to.n_ctx}}}},
    )


def _copilot(to: Target) -> LaunchSetup:
    return LaunchSetup(
        command=("copilot",),
        environment={
            "COPILOT_PROVIDER_BASE_URL": to.openai,
            "COPILOT_PROVIDER_API_KEY": to.key,
            "COPILOT_PROVIDER_WIRE_API": "responses",
            "COPILOT_MODEL": to.model,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(to.n_ctx - to.reply),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(to.reply),
            "COPILOT_OFFLINE": "true",
        },
    )


def _openwebui(to: Target) -> LaunchSetup:
    return LaunchSetup(
        # Its own port is ours, 8080, and it would listen to other machines.
        command=("open-webui", "serve", "--host", "127.0.0.1", "--port", "3000"),
        environment={
            "OPENAI_API_BASE_URL": to.openai,
            "OPENAI_API_KEY": to.key,
            # What it keeps from its first start would go before these.
            "ENABLE_PERSISTENT_CONFIG": "false",
            "ENABLE_OLLAMA_API": "false",
            "ENABLE_FORWARD_USER_INFO_HEADERS": "true",
        },
        inside=True,
    )


def _cline(to: Target) -> LaunchSetup:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": to.key,
        "model": to.model,
        "baseUrl": to.openai,
        "contextWindow": to.n_ctx,
        "maxTokens": to.reply,
    }
    chosen = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    stored = {"version": 1, "lastUsedProvider": provider, "modes": {}, "providers": {provider: chosen}}
    return LaunchSetup(
        command=("cline", "--data-dir", str(to.folder), "--provider", provider, "--model", to.model),
        files={"settings/providers.json": stored},
    )


@dataclass(frozen=True, slots=True)
class Client:
    """An agent that is known here."""

    program: str
    setup: Callable[[Target], LaunchSetup]
    """Its settings for a server."""
    first_prompt: int
    """Tokens that it sends before anything is said, as docs/agents.md has them; 0 where it sends none."""
    install: str


CLIENTS = {
    "aider": Client("aider", _aider, 1_795, "pip install aider-chat"),
    "claude": Client("claude", _claude, 56_210, "npm install -g @anthropic-ai/claude-code"),
    "cline": Client("cline", _cline, 16_174, "npm install -g cline"),
    "codex": Client("codex", _codex, 26_315, "npm install -g @openai/codex"),
    "copilot": Client("copilot", _copilot, 35_049, "npm install -g @github/copilot"),
    "opencode": Client("opencode", _opencode, 21_516, "npm install -g opencode-ai"),
    "openwebui": Client("open-webui", _openwebui, 0, "pip install open-webui"),
    "pi": Client("pi", _pi, 3_998, "npm install -g @mariozechner/pi-coding-agent"),
    "qwen": Client("qwen", _qwen, 47_267, "npm install -g @qwen-code/qwen-code"),
}
"""Every client that is known."""


def launch(
    context: typer.Context,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help=f"One of {', '.join(CLIENTS)}.")],
    url: Url = None,
    key: Key = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Model of a server that is started for it.")
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="Show the settings, and start nothing.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Delete the files that were written for it.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Start it though its first prompt does not fit into the context.")
    ] = False,
) -> None:
    """Start an agent with a server here. What stands behind `--` is for the agent.

    A server is started in the background if none runs, with as much context as fits. No file of yours is
    changed. The agent ends with `launch`.
    """
    if client not in CLIENTS:
        raise InvalidInputError(f"{client!r} is not known here; one of {', '.join(CLIENTS)} is")
    known = CLIENTS[client]
    folder = settings().home / "launch" / client
    if undo:
        there = folder.is_dir()
        shutil.rmtree(folder, ignore_errors=True)
        terminal.write_line(f"deleted {folder}" if there else f"nothing was written for {client}")
        return
    if show:
        to = _target(url, key, folder)
        setup = known.setup(to)
        _print(setup, [*setup.command, *context.args], folder)
        return
    program = shutil.which(known.program)
    if program is None:
        raise PerdureError(
            f"{known.program} is not installed: `{known.install}` installs it; "
            f"`perdure launch {client} --print` shows its settings"
        )
    if url is None and current() is None:
        _start_server(model, (context.find_root().default_map or {}).get("serve", {}))
    to = _target(url, key, folder)
    if to.n_ctx <= known.first_prompt and not anyway:
        raise PerdureError(_too_small(client, known, to))
    setup = known.setup(to)
    if setup.inside:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path, content in setup.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(folder / path, "w", encoding="utf-8", opener=private) as file:
            json.dump(content, file, indent=2)
    if known.first_prompt:
        terminal.note(
            f"{client} begins with a prompt of about {known.first_prompt:,} tokens, read once and then kept; "
            "the title of this terminal shows how far it is"
        )
    command = [os.path.abspath(program), *setup.command[1:], *context.args]
    with ReadingInTitle(client, known.first_prompt, lambda: _tokens_read(to)):
        code = run_agent(command, setup.environment, folder if setup.inside else None)
    raise typer.Exit(code)


def _too_small(client: str, known: Client, to: Target) -> str:
    needed = known.first_prompt + to.reply
    return (
        f"{client}'s first prompt has about {known.first_prompt:,} tokens, and {to.model} is served with a "
        f"context of {to.n_ctx:,}: it would be refused again and again. `perdure stop`, then "
        f"`perdure start MODEL --ctx {needed}` serves one that can (`perdure models` lists them); "
        "--anyway starts it all the same"
    )


def _start_server(model: str | None, chosen: dict[str, Any]) -> None:
    """Start a server in the background, with as much context as fits unless that was `chosen`."""
    options = [] if "n_ctx" in chosen else ["--ctx", "auto"]
    command = processes.isolated_python("-m", "perdure.cli", "start", *([model] if model else []), *options)
    if subprocess.run(command, check=False).returncode:
        raise PerdureError("the server did not start; its log says why")


def _tokens_read(to: Target) -> int | None:
    """Tokens that the busiest of our slots holds; None while nothing is read."""
    try:
        models = ask("/v1/machine", to.url, None if to.key == _NO_KEY else to.key)["models"]
    except PerdureError:
        return None
    busy = [slot["tokens"] or 0 for each in models for slot in each["slots"] if slot["busy"] and slot["own"]]
    return max(busy, default=None)


def _target(url: str | None, key: str | None, folder: Path) -> Target:
    running = current()
    if url is None and running is None:
        raise PerdureError(
            "no server runs in the background: `perdure start` starts one, or name one with --url"
        )
    entry = ask("/v1/machine", url, key)["models"][0]
    address = url or (running.address if running is not None else "")
    return Target(
        url=address.rstrip("/"),
        key=key or _NO_KEY,
        model=str(entry["id"]),
        n_ctx=int(entry["n_ctx"]),
        folder=folder,
    )


def _print(setup: LaunchSetup, arguments: list[str], folder: Path) -> None:
    for name, content in setup.files.items():
        typer.echo(f"# {folder / name}\n{json.dumps(content, indent=2)}")
    for name, value in setup.environment.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(shlex.join(arguments))
