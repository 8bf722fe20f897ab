"""Core: what every protocol and route of the server needs."""
