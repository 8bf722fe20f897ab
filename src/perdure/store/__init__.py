"""Durable bytes, crash-safe.

    STORE/index.sqlite       everything small, in SQLite
    STORE/blocks/ab/abcd….   one file a block, named by its id
    STORE/quarantine/        files that verify() found damaged
    STORE/unlisted           there while the index is made anew from the files
    STORE/lock               held by the one process that writes

durable       files that are there whole or not at all
block_file    a block as bytes that describe and prove themselves, and the folder of such files
block_table   the rows of the index that list blocks, and their totals
index         the database of a store, and its migrations
findings      what a walk over everything found
disk          the tier of the block cache on disk
records       labelled prefixes
writer        writing behind the reply
"""
