"""Which state do we already have.

block         a run of tokens with its state, named by a chained hash
tier          blocks in memory: a tree by prefix, under a byte budget
prefix        the longest prefix that can be put back, over all tiers
archive       sequences in the tiers: cut into blocks, found by their tokens, forgotten again
book          labelled prefixes that somebody asked to keep
working_set   sequences as a working set: who gets which, from what, at the least cost
"""
