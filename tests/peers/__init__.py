"""Clients that others publish, against our server."""
