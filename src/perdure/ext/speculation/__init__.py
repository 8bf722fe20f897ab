"""Speculation: guess the next tokens of a reply, and have one step compute and check several.

`guess_source.py` has the contract of what guesses: `ngrams.py` and `draft_model.py`. `speculator.py` decides
which drafter guesses how many tokens. `next_token.py` and `assistant.py` are contexts of llama.cpp with
layers that guess.
"""

from perdure.spi import Extension

EXTENSION = Extension(
    name="speculation",
    options=("perdure.ext.speculation.options:SpeculationOptions",),
    cores={
        "mtp": "perdure.ext.speculation.next_token:MAKER",
        "assistant": "perdure.ext.speculation.assistant:MAKER",
    },
    drafters=("perdure.ext.speculation.opener:OPENER",),
)
