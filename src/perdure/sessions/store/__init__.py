"""Where sessions are durable.

base      the contract: each call, who may call it, what may wait, what a failure means
migrate   all sessions of a store brought into another one, while in use
registry  which stores there are, and which one opens what is given
sql/      what stores in databases have in common
sqlite/   sessions in an SQLite database, in the folder of a store
postgres/ sessions in a PostgreSQL database, for several machines
"""
