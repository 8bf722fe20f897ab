"""Sessions in SQLite: the tables, and what is done with a database as a whole.

store   the opening and closing of a store, and its locks of turns; the calls are in `sql/store`
schema  tables and their migrations, SQLite's own words, numbers
folder  the folder of a store: its files, whose database it is, who uses it and which sessions are answering
repair  a walk over everything that a store keeps; what can be proved of a damaged database, in a new one
backup  a store in one file, and a store made of such a file
"""
