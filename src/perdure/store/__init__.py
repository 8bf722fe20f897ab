"""Durable bytes, crash-safe.

    STORE/index.sqlite       everything small, in SQLite
    STORE/blocks/ab/abcd….   one file a block, named by its id
    STORE/quarantine/        files that verify() found damaged
    STORE/unlisted           there while the index is made anew from the files
    STORE/lock               held by the one process that writes

durable       files that are there whole or not at all
block_file    a block as bytes that describe and prove themselves
block_folder  the files of blocks, by their names
index         what is there, and migrations
entry         what the index says of a block
findings      what a walk over everything found
disk          the tier of the block cache on disk
records       labelled prefixes
writer        writing behind the reply
"""
