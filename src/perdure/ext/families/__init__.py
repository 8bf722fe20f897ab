"""Model families beyond ChatML and Llama 3: how each marks reasoning and writes tool calls.

deepseek, mistral, harmony, glm, qwen3_coder, gemma, gemma4, granite, kimi, minimax, command_r, lfm2, muse,
functionary     each opens with an example of its text; `chat/formats/registry.py` has the signs by which a
                template shows that it is of one of them
named           a name, then arguments in JSON
tagged          a tag for each argument, with bare values
python_calls    calls as Python
keyed           JSON objects with one key
argument_types  what a tool's schema says that a bare value is
bounded_text    a text that comes in pieces, up to a size
learned         the form of calls that a template itself writes
"""

from perdure.spi import Extension

_HERE = "perdure.ext.families"

EXTENSION = Extension(
    name="families",
    parts={"call form": f"{_HERE}.learned:learn"},
    families={
        "apertus": f"{_HERE}.granite:APERTUS",
        "apriel": f"{_HERE}.granite:APRIEL",
        "apriel-thinking": f"{_HERE}.granite:APRIEL_THINKING",
        "command": f"{_HERE}.command_r:COMMAND",
        "command-r-plus": f"{_HERE}.command_r:COMMAND_R_PLUS",
        "deepseek": f"{_HERE}.deepseek:DEEPSEEK",
        "deepseek-dsml": f"{_HERE}.deepseek:DEEPSEEK_DSML",
        "firefunction": f"{_HERE}.functionary:FIREFUNCTION",
        "functionary": f"{_HERE}.functionary:FUNCTIONARY",
        "functionary-tagged": f"{_HERE}.functionary:FUNCTIONARY_TAGGED",
        "gemma": f"{_HERE}.gemma:GEMMA",
        "gemma4": f"{_HERE}.gemma4:GEMMA4",
        "gigachat": f"{_HERE}.granite:GIGACHAT",
        "glm": f"{_HERE}.glm:GLM",
        "granite": f"{_HERE}.granite:GRANITE",
        "harmony": f"{_HERE}.harmony:HARMONY",
        "hunyuan": f"{_HERE}.glm:HUNYUAN",
        "kimi": f"{_HERE}.kimi:KIMI",
        "kimi-k3": f"{_HERE}.kimi:KIMI_K3",
        "kimi-thinking": f"{_HERE}.kimi:KIMI_THINKING",
        "lfm2": f"{_HERE}.lfm2:LFM2",
        "lfm2-thinking": f"{_HERE}.lfm2:LFM2_THINKING",
        "lfm2.5": f"{_HERE}.lfm2:LFM2_5",
        "ling": f"{_HERE}.glm:LING",
        "llama4": f"{_HERE}.lfm2:LLAMA4",
        "magistral": f"{_HERE}.mistral:MAGISTRAL",
        "minicpm": f"{_HERE}.qwen3_coder:MINICPM",
        "minimax": f"{_HERE}.minimax:MINIMAX",
        "minimax-m1": f"{_HERE}.minimax:MINIMAX_M1",
        "minimax-m3": f"{_HERE}.minimax:MINIMAX_M3",
        "mistral": f"{_HERE}.mistral:MISTRAL",
        "mistral-named": f"{_HERE}.mistral:MISTRAL_NAMED",
        "mistral-thinking": f"{_HERE}.mistral:MISTRAL_THINKING",
        "muse": f"{_HERE}.muse:MUSE",
        "nemotron": f"{_HERE}.granite:NEMOTRON",
        "phi": f"{_HERE}.granite:PHI",
        "qwen3-coder": f"{_HERE}.qwen3_coder:QWEN3_CODER",
        "seed": f"{_HERE}.qwen3_coder:SEED",
        "solar": f"{_HERE}.kimi:SOLAR",
    },
)
