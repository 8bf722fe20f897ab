"""The tables of blocks in the index of a store, with their migrations."""

from __future__ import annotations

from collections.abc import Sequence

MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE block (
        id BLOB PRIMARY KEY,
        parent BLOB NOT NULL,
        start INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        has_rest INTEGER NOT NULL,
        nbytes INTEGER NOT NULL,
        used INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX block_parent ON block (parent);
    CREATE INDEX block_used ON block (used);
    CREATE TABLE record (
        number INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        tokens BLOB NOT NULL,
        root BLOB NOT NULL,
        UNIQUE (root, tokens)
    );
    CREATE TABLE label (
        record INTEGER NOT NULL REFERENCES record (number) ON DELETE CASCADE,
        name TEXT NOT NULL,
        PRIMARY KEY (record, name)
    ) WITHOUT ROWID;
    """,
    # What follows a block is found by its tokens; the oldest leaf and the totals without looking at others.
    """
    DROP INDEX block_parent;
    DROP INDEX block_used;
    CREATE INDEX block_follows ON block (parent, tokens);
    ALTER TABLE block ADD COLUMN leaf INTEGER NOT NULL DEFAULT 1;
    UPDATE block SET leaf = 0 WHERE id IN (SELECT parent FROM block);
    CREATE INDEX block_leaf ON block (used) WHERE leaf = 1;
    CREATE TABLE total (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
    INSERT INTO total SELECT 'blocks', count(*) FROM block;
    INSERT INTO total SELECT 'nbytes', CAST(total(nbytes) AS INTEGER) FROM block;
    INSERT INTO total SELECT 'clock', coalesce(max(used), 0) FROM block
    """,
)
