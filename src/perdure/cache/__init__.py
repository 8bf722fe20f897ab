"""Which state do we already have. Each imports only those above it.

block          tokens with their state, named by a chained hash; prefixes made of them
prefix_search  the blocks that follow one, sorted by their tokens; to which lengths a prefix can be put back
held_blocks    blocks of prefixes that are kept for a time: not evicted before their end
eviction       what a block or a slot is worth: which one is evicted first
kept_prefixes  prefixes that callers asked to keep, for a time or without an end
drop_plan      what goes with prefixes that are no longer kept
tiers/         where blocks lie: memory, disk, any number of others in order; searched as one
block_cache    sequences as blocks: cut, stored in the tiers, looked up by their tokens
transfer       the state of a prefix as blocks for another cache
slots/         what the engine's sequences hold, swapped in and out
cache_view     what the slots and the tiers hold, listed without moving any of it
prefix_cache   `rt.cache`: warm a prefix, ask what is held, clear it
"""
