"""Reply defaults: what holds for a reply where its request does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDefaults:
    """Sampling settings, and the most tokens of a reply. What a request says wins, also if it is none."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def fill(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What is asked of a reply, whole."""
        found = {**self.sampling, **options}
        if self.max_tokens is not None and "max_tokens" not in found:
            # A limit that the client never chose is no reason to refuse its prompt.
            found.update(max_tokens=self.max_tokens, limit_to_context=True)
        return found
