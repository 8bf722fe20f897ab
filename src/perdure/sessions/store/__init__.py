"""Where sessions are durable.

base      the contract: each call, who may call it, what may wait, what a failure means
registry  which stores there are, and which one opens what is given
sql/      what stores in databases have in common
sqlite/   sessions in an SQLite database, in the folder of a store
remote    stores on a server, which extensions bring
"""
