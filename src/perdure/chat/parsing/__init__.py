"""Parsing of replies: text, reasoning and tool calls, by family of models."""


class Malformed(Exception):
    """The text is not what was expected here."""
