"""What session stores in databases have in common.

database  the calls that a database has, the SQL that each says in its own words, and numbers
tables    turns, memories and sessions: how rows are written, read and proved
store     the calls of a session store: every change is one transaction
"""
