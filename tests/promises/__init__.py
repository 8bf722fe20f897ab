"""Black-box tests of what the engine promises, by promise id."""
