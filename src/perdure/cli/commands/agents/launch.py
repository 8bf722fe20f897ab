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

from perdure import system
from perdure.cli.commands.agents.why import Key, Url, ask
from perdure.cli.commands.background import current, private
from perdure.cli.output import terminal
from perdure.config import settings
from perdure.errors import InvalidInputError, PerdureError

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
class Setup:
    """What a client is started with."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    """JSON, by path in the folder of perdure's own."""
    inside: bool = False
    """Whether it is started in that folder: it leaves a file of its own where it is started."""


def _claude(to: Target) -> Setup:
    window = str(to.n_ctx)
    return Setup(
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


def _codex(to: Target) -> Setup:
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
    return Setup(command=("codex", *options, "-m", to.model), environment={"PERDURE_KEY": to.key})


def _opencode(to: Target) -> Setup:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "perdure",
        "options": {"baseURL": to.openai, "apiKey": to.key},
        "models": {to.model: {"name": to.model, "limit": {"context": to.n_ctx, "output": to.reply}}},
    }
    name = f"perdure/{to.model}"
    config = {"provider": {"perdure": provider}, "model": name, "small_model": name}
    return Setup(command=("opencode",), environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _pi(to: Target) -> Setup:
    model = {"id": to.model, "name": to.model, "contextWindow": to.n_ctx, "maxTokens": to.reply}
    provider = {"baseUrl": to.openai, "apiKey": to.key, "api": "openai-completions", "models": [model]}
    return Setup(
        command=("pi", "--provider", "perdure", "--model", to.model),
        environment={"PI_CODING_AGENT_DIR": str(to.folder)},
        files={"models.json": {"providers": {"perdure": provider}}},
    )


def _aider(to: Target) -> Setup:
    name, file = f"openai/{to.model}", "models.json"
    about = {
        "max_input_tokens": to.n_ctx,
        "max_output_tokens": to.reply,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return Setup(
        command=(
            *("aider", "--model", name, "--no-show-model-warnings"),
            *("--model-metadata-file", str(to.folder / file)),
        ),
        environment={"OPENAI_API_BASE": to.openai, "OPENAI_API_KEY": to.key},
        files={file: {name: about}},
    )


def _qwen(to: Target) -> Setup:
    return Setup(
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


def _copilot(to: Target) -> Setup:
    return Setup(
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


def _openwebui(to: Target) -> Setup:
    return Setup(
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


def _cline(to: Target) -> Setup:
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
    return Setup(
        command=("cline", "--data-dir", str(to.folder), "--provider", provider, "--model", to.model),
        files={"settings/providers.json": stored},
    )


CLIENTS: dict[str, Callable[[Target], Setup]] = {
    "aider": _aider,
    "claude": _claude,
    "cline": _cline,
    "codex": _codex,
    "copilot": _copilot,
    "opencode": _opencode,
    "openwebui": _openwebui,
    "pi": _pi,
    "qwen": _qwen,
}
"""Every client that is known, and its settings for a server."""


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
) -> None:
    """Start an agent with a server here. What stands behind `--` is for the agent.

    A server is started in the background if none runs. No file of yours is changed.
    """
    if client not in CLIENTS:
        raise InvalidInputError(f"{client!r} is not known here; one of {', '.join(CLIENTS)} is")
    folder = settings().home / "launch" / client
    if undo:
        there = folder.is_dir()
        shutil.rmtree(folder, ignore_errors=True)
        terminal.write_line(f"deleted {folder}" if there else f"nothing was written for {client}")
        return
    setup = CLIENTS[client](_target(url, key, model, folder, may_start=not show))
    arguments = [*setup.command, *context.args]
    if show:
        _print(setup, arguments, folder)
        return
    program = shutil.which(arguments[0])
    if program is None:
        raise PerdureError(
            f"{arguments[0]} is not installed; `perdure launch {client} --print` shows its settings"
        )
    if setup.inside:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, content in setup.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(folder / name, "w", encoding="utf-8", opener=private) as file:
            json.dump(content, file, indent=2)
    ended = subprocess.run(
        [os.path.abspath(program), *arguments[1:]],
        env={**os.environ, **setup.environment},
        cwd=folder if setup.inside else None,
        check=False,
    )
    raise typer.Exit(ended.returncode)


def _target(url: str | None, key: str | None, model: str | None, folder: Path, *, may_start: bool) -> Target:
    if url is None and current() is None:
        if not may_start:
            raise PerdureError(
                "no server runs in the background: `perdure start` starts one, or name one with --url"
            )
        command = system.isolated_python("-m", "perdure.cli", "start", *([model] if model else []))
        if subprocess.run(command, check=False).returncode:
            raise PerdureError("the server did not start; its log says why")
    entry = ask("/v1/machine", url, key)["models"][0]
    running = current()
    address = url or (running.address if running is not None else "")
    return Target(
        url=address.rstrip("/"),
        key=key or _NO_KEY,
        model=str(entry["id"]),
        n_ctx=int(entry["n_ctx"]),
        folder=folder,
    )


def _print(setup: Setup, arguments: list[str], folder: Path) -> None:
    for name, content in setup.files.items():
        typer.echo(f"# {folder / name}\n{json.dumps(content, indent=2)}")
    for name, value in setup.environment.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(shlex.join(arguments))
