"""Sessions in SQLite: tables, rows, and what is done with a database as a whole.

store         the calls of a session store: every change is one transaction
schema        tables and their migrations; how rows are written, read, proved and numbered
turn_table    turns, read back and written behind each other
memory_table  memories, read, searched and written
tree          the turns that a session branched off from, and its branches
folder        the folder of a store: its files, and whose database it is
locks         who uses a store, and which sessions are answering, over all processes
verify        a walk over everything that a store keeps
repair        what can be proved of a damaged database, in a new one
backup        a store in one file, and a store made of such a file
"""
