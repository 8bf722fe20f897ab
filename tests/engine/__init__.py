"""Both engines, by one contract."""
