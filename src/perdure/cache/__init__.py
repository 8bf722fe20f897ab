"""Which state do we already have.

block         tokens with their state, named by a chained hash; prefixes made of them
siblings      the blocks that follow one, sorted by their tokens
memory_tier   blocks in memory: a tree by prefix, under a byte budget
tiers         the longest prefix that can be put back, over all tiers
block_cache   sequences as blocks: cut, stored in the tiers, looked up by their tokens
record        labelled prefixes that somebody asked to keep, and what goes with them
prefix_cache  `rt.cache`: warm a prefix, ask what is held, clear it
cache_view    what the slots and the tiers hold, told without moving any of it
prefix_tree   the tiers as a tree of runs, as it is shown
block_list    the tiers as a list of blocks, page by page
slots/        what the engine's sequences hold, swapped in and out
reuse_rule    to which lengths a stored prefix can be put back, by the kind of its state
"""
