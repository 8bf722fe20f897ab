"""Model families, one a file: how each writes tool calls, and the signs by which a template shows it."""
