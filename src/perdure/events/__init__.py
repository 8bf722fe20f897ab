"""Events: what happens while a model answers, reported to subscribers.

    engine thread ──emit──▶ EventHub ──tuples──▶ Subscription ◀── a thread that calls an observer,
                                                              a loop over `rt.events()`,
                                                              or the next message to another process

No computation waits for an observer: a subscription is a bounded queue, and what it has no room for
is counted and dropped. While nobody has subscribed, a hub costs one look at an attribute.
"""

LIMIT = 10_000
"""Events that may wait for one reader."""
