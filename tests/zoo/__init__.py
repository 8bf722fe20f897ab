"""Toy models of many architectures, written by the tests: real GGUF files with random weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from . import assistant, attention, brief, experts, next_token, recurrent, wide
from .recipe import Adapter, ControlVector, MemoryKind, Recipe

__all__ = ["EXTRAS", "ZOO", "Adapter", "ControlVector", "MemoryKind", "Recipe", "digest", "names", "write"]

ZOO: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="llama", architecture="llama", memory="full", fill=attention.llama),
        Recipe(name="qwen3", architecture="qwen3", memory="full", fill=attention.qwen3),
        Recipe(name="qwen3moe", architecture="qwen3moe", memory="full", fill=experts.qwen3moe),
        Recipe(name="deepseek2", architecture="deepseek2", memory="full", fill=experts.deepseek2),
        Recipe(
            name="gemma3",
            architecture="gemma3",
            memory="sliding",
            window=attention.GEMMA3_WINDOW,
            fill=attention.gemma3,
        ),
        Recipe(name="mamba", architecture="mamba", memory="recurrent", fill=recurrent.mamba),
        Recipe(name="jamba", architecture="jamba", memory="hybrid", fill=recurrent.jamba),
    )
}

# Files for single purposes; a test that runs over the zoo leaves them out.
EXTRAS: dict[str, Recipe | Adapter | ControlVector] = {
    "llama-wide": Recipe(
        name="llama-wide",
        architecture="llama",
        memory="full",
        vocabulary=wide.VOCABULARY,
        fill=wide.llama,
    ),
    "deepseek2-mtp": Recipe(
        name="deepseek2-mtp", architecture="deepseek2", memory="full", fill=next_token.deepseek2
    ),
    **{
        f"{name}-mtp": Recipe(
            name=f"{name}-mtp",
            architecture=name,
            memory="sliding",
            window=next_token.WINDOW,
            fill=fill,
        )
        for name, fill in (("step35", next_token.step35), ("mimo2", next_token.mimo2))
    },
    "qwen35-mtp": Recipe(name="qwen35-mtp", architecture="qwen35", memory="hybrid", fill=next_token.qwen35),
    "gemma4": Recipe(
        name="gemma4",
        architecture="gemma4",
        memory="sliding",
        window=assistant.WINDOW,
        fill=assistant.gemma4,
    ),
    "gemma4-assistant": Recipe(
        name="gemma4-assistant",
        architecture="gemma4-assistant",
        memory="sliding",
        window=assistant.WINDOW,
        fill=assistant.gemma4_assistant,
    ),
    "llama-brief": Recipe(name="llama-brief", architecture="llama", memory="full", fill=brief.llama),
    "llama-lora": Adapter(
        name="llama-lora", base=ZOO["llama"], alpha=2.0 * attention.LORA_RANK, fill=attention.llama_lora
    ),
    # Random like the first one, and so another: the name is the seed.
    "llama-lora2": Adapter(
        name="llama-lora2", base=ZOO["llama"], alpha=2.0 * attention.LORA_RANK, fill=attention.llama_lora
    ),
    "llama-alora": Adapter(
        name="llama-alora",
        base=ZOO["llama"],
        alpha=2.0 * attention.LORA_RANK,
        fill=attention.llama_lora,
        invocation=attention.INVOCATION,
    ),
    "llama-vector": ControlVector(name="llama-vector", base=ZOO["llama"], fill=attention.llama_vector),
}


def names() -> list[str]:
    """The models that stand for an architecture each, in a fixed order."""
    return list(ZOO)


def write(name: str, folder: Path) -> Path:
    """Write a model of the zoo or one of the extras into `folder`, which must exist, and give its path."""
    return (ZOO | EXTRAS)[name].write(folder)


def digest() -> str:
    """Names the present state of the zoo: it changes whenever a file could come out differently."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
