"""Tokens in, tokens out.

speculation/  tokens guessed ahead, which change no reply
sampling/     settings, sampler, grammars: rows of logits in, tokens out
request       what is asked for, and what comes back
stream        a reply being made: the queue that is filled, and the handle that reads it
sequence      the samples of one request: their tokens, and the choice of the next
stops         where a reply ends: bytes to text up to a stop string, phrases said again and again
scheduler     who gets a slot, and what the next steps compute; no thread
executor      computes a step, draws, forks samples, contains errors
step_events   what the engine loop tells whoever subscribed to events
engine_loop   the one thread that does all this, and how others reach it
infill        the prompt that has a model write what stands between two texts
choice        which of several texts the model finds likeliest
embedding     texts that wait to be made vectors
"""
