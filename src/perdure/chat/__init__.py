"""Messages to tokens and back: templates, reasoning, tool calls, overflow."""
