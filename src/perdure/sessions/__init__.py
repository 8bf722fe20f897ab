"""Conversations that last.

    turn          what was said, with its exact tokens and a digest over all of it; the turns that led there
    info          what is listed of sessions and memories, the kinds of records, quotas
    tree          the turns of a conversation and its branches, as they are shown
    store/        where sessions are durable: the contract, and databases behind it
    session_view  one conversation to be read: what it is, its turns as the store has them
    pending_turn  a turn in the making, what it may have besides messages, and what is written down of it
    session       the same with all that changes it: say, edit, fork, rewind, fold, sleep, wake, export
    sessions      all of them, and their memories: find, list, import, with an engine or without one
    responses     sessions for single responses, which begin where another one stands
    fold          an exhausted conversation becomes a summary and its last turns

Turns form a tree and never change; a session is a name for one of them, as a branch is in a version
control system. So a fork adds one row, and `rewind` adds none.
"""
