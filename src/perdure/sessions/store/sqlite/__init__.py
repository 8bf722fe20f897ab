"""Sessions in SQLite: the folder, the tables with their migrations, locks of turns (`store`)."""

FILE = "sessions.sqlite"
"""The database, in the folder of a store."""
