"""Which state do we already have.

block         a run of tokens with its state, named by a chained hash
tier          blocks in memory: a tree by prefix, under a byte budget
book          labelled prefixes that somebody asked to keep
working_set   sequences as a working set: who gets which, from what, at the least cost
"""
