"""Sampling: rows of logits in, one token each out.

settings    the settings of a draw, checked
sampler     draws for all sequences of a step at once
candidates  the few tokens of a row that can still be drawn
repetition  penalties on what was said before
grammar     structured output: schemas, regexes, grammars
"""
