"""Tokens in, tokens out.

sampling/     settings, sampler, grammars: rows of logits in, tokens out
text          bytes to text, piece by piece; stop strings
request       what is asked for, and what comes back
stream        a reply being made: the queue that is filled, and the handle that reads it
sequence      the samples of one request: their tokens, and the choice of the next
slots         which slot a request gets, and how much of its prompt is there
scheduler     who gets a slot, and what the next steps compute; no thread
executor      computes a step, draws, forks samples, contains errors
engine_loop   the one thread that does all this, and how others reach it
embedding     texts that wait to be made vectors
"""
