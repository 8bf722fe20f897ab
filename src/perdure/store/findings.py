"""Findings: what a walk over everything on the disk found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a walk over everything found, and did about it."""

    blocks: int
    nbytes: int
    missing: int
    """Entries without a whole file, dropped."""
    adopted: int
    """Whole files without an entry, entered."""
    mended: int
    """Entries that said something else than their files, put right."""
    quarantined: int
    """Damaged files, moved aside."""
    leftovers: int
    """Temporary files of writers that are gone, deleted."""
    rebuilt: bool
    """Whether the index could not be used, and was made anew from the files."""

    @property
    def sound(self) -> bool:
        return not (self.missing or self.quarantined or self.mended or self.rebuilt)
