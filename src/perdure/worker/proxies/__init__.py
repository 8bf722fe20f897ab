"""What a backend has, asked of the engine's process call by call.

tokenizer     text and tokens
prefix_cache  blocks, tiers and their counts
"""
