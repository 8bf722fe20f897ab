"""Where sessions are durable.

base      the contract: each call, who may call it, what may wait, what a failure means
registry  which stores there are, and which one opens what is given
sqlite/   sessions in an SQLite database, in the folder of a store
"""
