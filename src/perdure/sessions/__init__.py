"""Conversations that last.

    turn          what was said, with its exact tokens, and a digest over all of it
    history       where a conversation stands: the turns that led there
    info          what is listed of sessions and memories
    schema, rows  tables, and how rows are read and proved
    session_store sessions, turns and memories in SQLite
    session       one conversation: say, fork, rewind, sleep, wake
    sessions      all of them: find, list, import, with an engine or without one
    memories      labelled turns that can be woken by their address
    fold          an exhausted conversation becomes a summary and its last turns
    export        a session as one file that can be moved
    importing     what is taken of such a file, and what is left out
    verify        a walk over everything that a store keeps
    repair        what can be proved of a damaged database, in a new one

Turns form a tree and never change; a session is a name for one of them, as a branch is in a version
control system. So a fork costs a row, and going back costs none.
"""
