"""Sessions in SQLite: the folder, the tables with their migrations, locks of turns (`store`)."""
