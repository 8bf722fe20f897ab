"""Commands that look inside a model."""
