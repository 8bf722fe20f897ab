"""Sampling: rows of logits in, one token each out.

stage            the contract of a stage, the candidates of a row, the bias on tokens
repetition       penalties, and DRY
sampler          stages that choose what can be drawn (top-k, top-p, …), the chain of a sequence, and the draw
rare_cuts        others that choose: typical, top-n-sigma, XTC, Mirostat
grammar          structured output: schemas, regexes, grammars
matcher          a reply's way through a grammar
grammar_checker  compiles a grammar in a child process first, where its death or its delay costs nothing
grammar_child    that child process
"""
