"""A context: sequences of tokens in one engine, and the rules that keep them true.

context       the calls: decode, step, truncate, fork, adapt; save, load, checkpoint, restore, capture,
              assemble
guarded_core  one call at a time, whole or not at all; closing
ledger        the tokens that are in the cache; the way back, for when a call fails in its middle; the rows of
              the last step, and when they may be read
"""

from perdure.engine.context.context import Context as Context
from perdure.engine.context.context import Feed as Feed
