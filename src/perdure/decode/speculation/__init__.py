"""Speculation: guess the next tokens of a reply, and have one step compute and check several.

`drafter.py` has the contract of a drafter, which guesses; `ngrams.py` and `draft_model.py` are drafters;
`speculator.py` decides who guesses how far. The executor draws each guessed token from its own row, as if
nothing had been guessed, and keeps those that were right: what is guessed changes how long a reply takes, and
never what it is.
"""
