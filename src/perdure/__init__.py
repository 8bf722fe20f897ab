"""perdure: a runtime for local language models whose sessions last."""

__version__ = "0.1.0"
