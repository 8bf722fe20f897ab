"""Where blocks lie, from the fastest place to the slowest.

base           the contract of a tier: threads, what may wait, what a failure means
memory         blocks in this process: a tree by prefix, under a byte budget
block_index    the rows that list blocks and kept prefixes, in the database of a store
disk           a file a block in a folder, crash-safe
archive        the blocks of another folder of a store, read and never added to
write_behind   any lower tier, written behind the reply
tiered         all tiers searched as one

Others are brought by extensions, which `base` finds by the scheme of a URL.
"""
