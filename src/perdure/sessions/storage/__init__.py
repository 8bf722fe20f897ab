"""Sessions in SQLite: tables, rows, and what is done with a database as a whole.

schema         tables and their migrations; how rows are written, read, proved and numbered
turn_table     turns, read back and written behind each other
memory_table   memories, read and written
session_folder the folder of a store: its files, and whose database it is
session_store  sessions, and every change as one transaction
verify         a walk over everything that a store keeps
repair         what can be proved of a damaged database, in a new one
"""
