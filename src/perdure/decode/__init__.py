"""Tokens in, tokens out.

sampling    the settings of a draw, checked, as stages for the engine's sampler chain
text        bytes to text, piece by piece; stop strings
grammar     structured output: schemas, regexes, grammars
request     what is asked for, and what comes back
job         one request on its way: deltas for whoever waits, in threads or asyncio
run         one reply being made: its script of tokens, and the choice of the next
group       the samples of one request
placement   which sequence a request gets, and how much of its prompt is there
scheduler   one engine thread for all of them
"""
