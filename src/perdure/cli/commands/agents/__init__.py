"""Commands for agents and their operators: start one, and see what of its prompts was computed again."""
