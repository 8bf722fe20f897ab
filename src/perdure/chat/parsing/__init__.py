"""Parsing of replies: text, reasoning and tool calls, by family of models."""

import re


class Malformed(Exception):
    """The text is not what was expected here."""


ID, INDEX = "\ue010", "\ue011"
"""In the pieces of a call: where its id stands, and where its number, which begins at `first_index`. In
names and arguments they are characters like any other."""
PLACES = re.compile(f"({ID}|{INDEX})")
