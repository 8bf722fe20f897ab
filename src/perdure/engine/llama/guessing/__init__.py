"""Cores that guess: next-token layers of a model (MTP), and drafters that read its hidden states."""
