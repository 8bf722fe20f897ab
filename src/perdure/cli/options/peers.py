"""Options of other programs, in our words."""

from __future__ import annotations

from collections.abc import Sequence

_OURS = {
    "--temp": "--temperature",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--ctx-size": "--ctx",
    "--n-ctx": "--ctx",
    "--num-ctx": "--ctx",
    "--context-length": "--ctx",
    "--repetition-penalty": "--repeat-penalty",
    "--system-prompt": "--system",
    "-sys": "--system",
    "--chat-template": "--template",
    "--chat-template-file": "--template",
    "--json-schema": "--schema",
    "--json-schema-file": "--schema",
    "--grammar-file": "--grammar",
    "--parallel": "--slots",
    "-np": "--slots",
    "--num-parallel": "--slots",
    "--n-threads": "--threads",
    "--num-threads": "--threads",
    "-ngl": "--gpu-layers",
    "--n-gpu-layers": "--gpu-layers",
    "--num-gpu": "--gpu-layers",
}
_INSTEAD = {
    "-p": 'the prompt needs no option: perdure run "PROMPT"',
    "--prompt": 'the prompt needs no option: perdure run "PROMPT"',
    "-hf": "a model on the hub is named in first place: perdure run owner/repo:Q4_K_M",
    "--hf-repo": "a model on the hub is named in first place: perdure run owner/repo:Q4_K_M",
    "--model-url": "a model's URL is named in first place: perdure run https://…/model.gguf",
    "-cnv": "a conversation in the terminal is perdure chat",
    "--conversation": "a conversation in the terminal is perdure chat",
    "--interactive": "a conversation in the terminal is perdure chat",
    "--api-key": "keys are in a file: perdure serve --keys FILE",
    "--keepalive": "the model is loaded as long as the command runs",
    "--format": "--schema FILE holds the reply to a JSON schema, --json prints all about it as JSON",
}


def plain_options(arguments: Sequence[str]) -> list[str]:
    """Arguments with underscores in the names of options as dashes: --max_tokens is --max-tokens."""
    found = list(arguments)
    end = found.index("--") if "--" in found else len(found)
    for at, word in enumerate(found[:end]):
        name, equals, value = word.partition("=")
        if name.startswith("--") and "_" in name:
            found[at] = name.replace("_", "-") + equals + value
    return found


def advice_for(arguments: Sequence[str], known: frozenset[str]) -> str | None:
    """What to say about the first option that belongs to another program, if there is one.

    `known` are the options of the command that was asked for.
    """
    for word in arguments:
        if word == "--":
            return None
        name = word.partition("=")[0]
        if name in known:
            continue
        if name in _INSTEAD:
            return f"{name}: {_INSTEAD[name]}"
        if name in _OURS:
            return f"{name} is called {_OURS[name]} here"
    return None
