"""Sessions in SQLite: tables, rows, and what is done with a database as a whole.

schema         tables and their migrations
rows           how rows are read and proved
session_store  sessions, turns and memories, read and written
verify         a walk over everything that a store keeps
repair         what can be proved of a damaged database, in a new one
"""
