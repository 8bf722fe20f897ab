"""Durable bytes, crash-safe.

    STORE/index.sqlite       everything small, in SQLite
    STORE/blocks/ab/abcd….   one file a block, named by its id
    STORE/quarantine/        files that verify() found damaged
    STORE/unlisted           there while the index is made anew from the files
    STORE/lock               held by the one process that writes

index         the database of a store, and its migrations
block_schema  the tables of blocks in it
table_check   whether rows can be missed, found out while it is used
owner         which process runs the engine of a store, and where it serves the others

Blocks on disk are a tier of the cache: `cache/tiers/disk.py`.
"""
