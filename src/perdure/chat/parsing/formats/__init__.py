"""Tool-call formats, one a file."""
