"""What `perdure sessions verify` and `perdure cache verify` print."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.cli.output import words
from perdure.sessions.store.registry import FOUND, Verification


def lines(found: Verification) -> Iterator[str]:
    """What was found in a store, for a terminal."""
    yield (
        f"{words.count(found.sessions, 'session')}, {words.count(found.turns, 'turn')}, "
        f"{found.memories} memories: {len(found.damaged)} damaged"
    )
    yield from (f"  {what}: {why}" for what, why in found.damaged)
    if found.database:
        yield f"the database of sessions is damaged: {found.database}"
    if found.repair is not None:
        kept = found.repair
        yield (
            f"kept {words.count(kept.sessions, 'session')}, {words.count(kept.turns, 'turn')} and "
            f"{kept.memories} memories; the damaged database is {kept.aside.name} now"
        )
        yield from (f"  {what}" for what in kept.cut)
        if kept.found:
            yield f"  turns whose session is not known are in the namespace {FOUND!r}"
    if found.not_repaired:
        yield f"nothing was done about it: {found.not_repaired}"
    blocks = found.blocks
    if blocks is not None:
        yield (
            f"{words.count(blocks.blocks, 'block')}, {blocks.nbytes} bytes: {blocks.missing} missing, "
            f"{blocks.adopted} adopted, {blocks.mended} entries mended, {blocks.quarantined} damaged and "
            f"moved aside, {blocks.leftovers} leftovers deleted"
        )
        if blocks.rebuilt:
            yield "the index of blocks was damaged and has been rebuilt; labels were lost with it"
    if found.unread:
        yield f"blocks were not looked at: {found.unread}"
    if found.sound:
        yield "all is well"
    elif not found.damaged and not found.database and not found.unread:
        yield "sessions are whole; state that is gone is computed anew when it is needed"
