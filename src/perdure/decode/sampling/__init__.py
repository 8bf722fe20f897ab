"""Sampling: rows of logits in, one token each out.

stage       the contract of a stage
steering    stages that change logits: bias, penalties, DRY
cuts        stages that choose what can be drawn: top-k, top-p, min-p, …
mirostat    a stage in place of all cuts
candidates  the few tokens of a row that can still be drawn
sampler     the chain of a sequence; draws for all sequences of a step
together    the compiled path: chains of which it knows every stage
grammar     structured output: schemas, regexes, grammars
"""
