"""Parsing of replies: text, reasoning and tool calls, by family of models."""
