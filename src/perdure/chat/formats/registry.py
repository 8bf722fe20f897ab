"""The families that are known, and which one a template belongs to."""

from __future__ import annotations

import threading

from perdure.chat.formats import (
    command_r,
    deepseek,
    functionary,
    gemma,
    gemma4,
    glm,
    granite,
    harmony,
    hermes,
    kimi,
    lfm2,
    llama3,
    minimax,
    mistral,
    muse,
    qwen3_coder,
)
from perdure.chat.parsing.family import THINK, Family
from perdure.chat.parsing.json_objects import JSON
from perdure.errors import InvalidInputError

GENERIC = Family("generic", calls=JSON)
THINKING = Family("thinking", THINK, JSON, ("<think>",))

# The first whose signs are all there is taken, so what is more special stands before what is less so.
_BUILT_IN = (
    muse.MUSE,
    harmony.HARMONY,
    gemma4.GEMMA4,
    deepseek.DEEPSEEK_DSML,
    deepseek.DEEPSEEK,
    command_r.COMMAND_R_PLUS,
    command_r.COMMAND,
    hermes.GRANITE4,
    granite.GRANITE,
    granite.PHI,
    mistral.MAGISTRAL,
    mistral.MISTRAL_NAMED,
    mistral.MISTRAL_THINKING,
    mistral.MISTRAL,
    kimi.KIMI_K3,
    kimi.KIMI_THINKING,
    kimi.SOLAR,
    glm.HUNYUAN,
    minimax.MINIMAX_M1,
    kimi.KIMI,
    functionary.FUNCTIONARY,
    functionary.FUNCTIONARY_TAGGED,
    functionary.FIREFUNCTION,
    granite.NEMOTRON,
    llama3.LLAMA3_THINKING,
    llama3.LLAMA3,
    lfm2.LLAMA4,
    lfm2.LFM2_THINKING,
    lfm2.LFM2,
    lfm2.LFM2_5,
    granite.APRIEL_THINKING,
    granite.APRIEL,
    granite.APERTUS,
    granite.GIGACHAT,
    qwen3_coder.SEED,
    minimax.MINIMAX_M3,
    minimax.MINIMAX,
    qwen3_coder.MINICPM,
    glm.LING,
    glm.GLM,
    qwen3_coder.QWEN3_CODER,
    hermes.REKA,
    hermes.QWEN3,
    hermes.HERMES,
    gemma.GEMMA,
    hermes.CHATML_THINKING,
    hermes.CHATML,
    THINKING,
    GENERIC,
)

_lock = threading.Lock()
_registered: dict[str, Family] = {each.name: each for each in _BUILT_IN}


def register(family: Family) -> None:
    """Add a family, or replace the one of that name. It is looked for before all others."""
    if not isinstance(family, Family):
        raise InvalidInputError(f"a Family can be registered, got {type(family).__name__}")
    global _registered
    with _lock:
        others = {name: each for name, each in _registered.items() if name != family.name}
        _registered = {family.name: family, **others}


def family(name: str) -> Family:
    """The family of that name."""
    try:
        return _registered[name]
    except KeyError:
        raise InvalidInputError(
            f"there is no family {name!r}; known are {', '.join(names())}: register() adds others"
        ) from None


def names() -> tuple[str, ...]:
    return tuple(sorted(_registered))


def detect(template_source: str, architecture: str = "") -> Family:
    """The family that a template's own markers tell of, else the architecture's, else a generic one."""
    known = tuple(_registered.values())
    for each in known:
        if (
            each.signs
            and all(sign in template_source for sign in each.signs)
            and not any(sign in template_source for sign in each.unless)
        ):
            return each
    if not template_source:
        for each in known:
            if each.architectures and architecture.startswith(each.architectures):
                return each
    return _registered["generic"]
