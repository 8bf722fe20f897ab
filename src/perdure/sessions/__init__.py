"""Conversations that last.

    turn       what was said, with its exact tokens, and a digest over all of it
    history    where a conversation stands: the turns that led there
    info       what is listed of sessions and memories
    store/     where sessions are durable: the contract, and SQLite behind it
    session    one conversation: read, say, edit, fork, rewind, fold, sleep, wake, export
    sessions   all of them: find, list, import, with an engine or without one
    memories   labelled turns that can be woken by their address
    fold       an exhausted conversation becomes a summary and its last turns
    export     a session as one file that can be moved
    importing  what is taken of such a file, and what is left out

Turns form a tree and never change; a session is a name for one of them, as a branch is in a version
control system. So a fork adds one row, and `rewind` adds none.
"""
