"""Preference training (DPO): of two replies to a prompt, make the better one likelier.

The loss and the batches are those of mlx-lm-lora, in mlx-lm's own tuner. A line of a file is a pair, as
`{"prompt": …, "chosen": …, "rejected": …}`, or with the `messages` before the reply in place of the prompt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from perdure import InvalidInputError, Message
from perdure.ext.mlx.packages import MissingPackageError
from perdure.ext.mlx.training.examples import ChatEncoder, Example, from_messages, read_lines
from perdure.spi.chat import parse_messages


class Pair(NamedTuple):
    """Two replies to one prompt."""

    chosen: Example
    rejected: Example


class ChatPair(NamedTuple):
    """The same as messages."""

    before: tuple[Message, ...]
    chosen: str
    rejected: str


def read_pairs(path: Path) -> Iterator[ChatPair]:
    """The pairs of a JSONL file, one a line."""
    for where, record in read_lines(path):
        texts = [record.get(name) if isinstance(record, dict) else None for name in ("chosen", "rejected")]
        chosen, rejected = texts
        if not isinstance(chosen, str) or not isinstance(rejected, str):
            raise InvalidInputError(f'{where} has no texts "chosen" and "rejected"')
        if isinstance(record.get("messages"), list):
            try:
                before = parse_messages(record["messages"])
            except InvalidInputError as error:
                raise InvalidInputError(f"{where}: {error}") from None
        elif isinstance(record.get("prompt"), str):
            before = (Message(role="user", content=record["prompt"]),)
        else:
            raise InvalidInputError(f'{where} has neither "messages" nor "prompt"')
        if not before or before[-1].role == "assistant":
            raise InvalidInputError(f"{where}: the messages end before the reply, with the user's")
        yield ChatPair(before, chosen, rejected)


def pair_of(encoder: ChatEncoder, pair: ChatPair, longest: int) -> Pair | None:
    """A pair as tokens; None where one of the two has more than `longest` tokens."""
    sides: list[Example] = []
    for text in (pair.chosen, pair.rejected):
        messages = (*pair.before, Message(role="assistant", content=text))
        # Earlier replies of the conversation are not judged.
        examples = list(from_messages(encoder, messages, longest, last=True))
        if not examples:
            return None
        sides += examples
    return Pair(*sides)


def check_here() -> Any:
    """The module of mlx-lm-lora that has the loss."""
    try:
        return importlib.import_module("mlx_lm_lora.trainer.dpo_trainer")
    except ImportError as error:
        raise MissingPackageError(
            f"preference training needs mlx-lm-lora: pip install 'perdure[preference]' ({error})"
        ) from None


def preferred(reference: Any, beta: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A loss and batches for the tuner: how much likelier the better reply became than with `reference`."""
    package = check_here()
    reference.freeze()

    def score(model: Any, tokens: Any, masks: Any) -> Any:
        return package.compute_score(package.get_token_scores(model, tokens, masks), masks, "sigmoid")

    def loss(model: Any, chosen: Any, rejected: Any, good: Any, bad: Any) -> tuple[Any, Any]:
        value, _, count, _ = package.dpo_loss(
            policy_chosen_score=score(model, chosen, good),
            policy_rejected_score=score(model, rejected, bad),
            reference_chosen_score=score(reference, chosen, good),
            reference_rejected_score=score(reference, rejected, bad),
            chosen_masks=good,
            rejected_masks=bad,
            beta=beta,
            delta=0.0,
            loss_type="sigmoid",
        )
        return value, count

    def batches(
        dataset: list[Pair],
        batch_size: int,
        max_seq_length: int,
        *,
        loop: bool = False,
        comm_group: object = None,
    ) -> Iterator[Any]:
        records = [
            {
                "chosen": pair.chosen.tokens,
                "rejected": pair.rejected.tokens,
                "chosen_prompt_length": pair.chosen.start,
                "rejected_prompt_length": pair.rejected.start,
            }
            for pair in dataset
        ]
        yield from package.iterate_dpo_batches(records, batch_size, max_seq_length, train=loop)

    return loss, batches
