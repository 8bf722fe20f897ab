"""Sessions in SQLite: the tables, and what is done with a database as a whole.

store   the folder, the tables with their migrations, locks of turns; the calls are in `sql/store`
repair  a walk over everything that a store keeps; what can be proved of a damaged database, in a new one
backup  a store in one file, and a store made of such a file
"""
