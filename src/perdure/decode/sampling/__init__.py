"""Sampling: rows of logits in, one token each out.

stage     the contract of a stage, the candidates of a row, stages that change logits: bias, penalties, DRY
sampler   stages that choose what can be drawn (top-k, top-p, min-p, …), the chain of a sequence, and the draw
grammar   structured output: schemas, regexes, grammars
"""
