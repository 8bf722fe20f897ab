"""Sessions in PostgreSQL, for several machines. Needs the extra `cluster`; nothing here is imported before a
store is opened that is one of these.

place     the URL of a database, and the folder of this machine that stands for it
schema    tables with their migrations, PostgreSQL's own words, numbers
database  a pool of connections: bounded waits, transactions whose end is known, typed errors
accounts  keys of all replicas, and what they have used
leases    which process has a session: leases that run out, with fencing tokens
store     the opening and closing of a store; the calls are in `sql/store`
"""
