"""Tokens in, tokens out.

sampling/     settings, sampler, grammars: rows of logits in, tokens out
request       what is asked for, and what comes back
stream        a reply being made: the queue that is filled, and the handle that reads it
sequence      the samples of one request: their tokens, and the choice of the next
asyncio_reader  readers of these in an event loop
stops         where a reply ends: bytes to text up to a stop string, phrases said again and again
scheduler     which request gets a slot, and what the next steps compute; no thread
exact_scheduler  the same for `exact`: steps whose shapes no other request changes
drafter       the contract of what guesses the next tokens
executor      computes a step, draws, forks samples, contains errors
step_events   what the engine loop reports to subscribers of events
engine_loop   the one thread that does all this, and how others reach it
choice        which of several texts the model finds likeliest
embedding     texts that wait to be made vectors
"""
