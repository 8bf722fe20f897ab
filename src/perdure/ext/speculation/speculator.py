"""The speculator: whose next tokens are guessed, how far, and by which source.

    k guesses, each right with chance p if those before it are, give   1 + p + p² + … + pᵏ tokens
    and take                                                           seconds(k + 1) + k · price
    so as many are made as give the most tokens a second.

The chance is counted. What is looked up (n-grams) is guessed at every step, and compared with what is drawn
even where it is not in the step: a reply whose first guess was wrong has guesses again once they would be
right. What is computed (a draft model) is asked only where that promises to pay, and counted over all
replies. Times are measured (`StepCosts`). A change of size costs a device time: it is spread over as many
steps as guesses were right lately, so that a text has to be known before another size is tried.

No reply loses more than its credit, and a guess more: what a wrong guess may cost, half a hundredth of its
time, and what right guesses have saved it. What is looked up starts short, and grows as it is right.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from perdure.ext.speculation.guess_source import Guess, GuessSource
from perdure.ext.speculation.step_costs import WINDOW, StepCosts
from perdure.spi.decode import ADAPT, MAX_GUESSES, Budget, Chunk, Step, TokenSequence

FULL = 16
"""Streams of a step from which on nothing is guessed: the engine is busy with those."""
SIZES = frozenset((1, 2, 3, 5, 7, 15, 31))
"""Guesses of a step: a device prepares each size."""
SHARE = 0.005
"""Of a reply's time that it may lose to wrong guesses."""
WORTH = 1.02
"""How much more a step with guesses must promise."""
IN_A_ROW = 128
"""Steps with guesses, after which one goes without: what guesses save is measured by it. As many more where
that changes the size."""
MODEL = 0.7
"""How likely a guess of a model is taken to be right before any was."""
PRIOR = 2
"""Guesses as which the first estimate of a chance counts."""
MEMORY = 0.95
"""What is left of a count at the next step."""
KNOWN = 8
"""Guesses that were right lately, also outside of steps, from which on a text is known."""
NOTHING = Guess((), 0.0, "")


class GuessRecord:
    """How many guesses were right, and how many were the first wrong one. The last ones count most."""

    def __init__(self) -> None:
        self.right = 0.0
        self.wrong = 0.0

    def add(self, right: int, *, wrong: bool) -> None:
        self.right = self.right * MEMORY + right
        self.wrong = self.wrong * MEMORY + wrong

    def chance(self, expected: float) -> float:
        """That a guess is right whose forerunners are, where so much was expected beforehand."""
        return (self.right + PRIOR * expected) / (self.right + self.wrong + PRIOR)


class GuessedReply:
    """What is known of one reply."""

    def __init__(self, credit: float) -> None:
        self.credit = credit
        """Seconds that it may lose."""
        self.guess = NOTHING
        """What is expected from `start` on, as far as it was not drawn yet."""
        self.start = 0
        self.saved = 0.0
        """Seconds that its guesses have saved; less than nothing where they cost more."""
        self.run = 0
        """Tokens that were guessed right in a row, up to now."""
        self.records: dict[str, GuessRecord] = {}

    @property
    def evidence(self) -> float:
        """Guesses that were right lately."""
        right = 0.0
        for record in self.records.values():
            right += record.right
        return right

    def compare(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Compare the guess with what was drawn since: how many were right, and whether one was wrong."""
        guess, start, end, right = self.guess, self.start, len(tokens), 0
        most = min(len(guess.tokens), end - start)
        while right < most and guess.tokens[right] == tokens[start + right]:
            right += 1
        left = guess.tokens[right:] if right == end - start else ()
        self.guess, self.start = Guess(left, guess.confidence, guess.source), end
        self.run = self.run + right if right == most else 0
        return right, right < most


class Speculator:
    """Puts guesses into steps: the `Drafter` of this extension."""

    def __init__(
        self,
        sources: Sequence[GuessSource],
        *,
        prepares: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prepares`: the engine prepares each size of a step when it first comes, as a GPU does."""
        self._lookups = [each for each in sources if not each.computes]
        self._models = [each for each in sources if each.computes]
        self._clock = clock
        self._prepares = prepares
        self._costs = StepCosts(prepares=prepares)
        self._replies: WeakKeyDictionary[TokenSequence, GuessedReply] = WeakKeyDictionary()
        self._in_step: list[GuessedReply] = []
        """Those of the step in flight, in their order."""
        self._records: dict[str, GuessRecord] = {}
        """Of models, over all replies."""
        self._prices: dict[str, deque[float]] = {}
        """What a guess of a model took lately."""
        self._unasked: dict[str, float] = {}
        """Seconds of steps since a model was asked."""
        self._asking = 0.0
        """Seconds that models have guessed for the step in flight."""
        self._in_a_row = 0
        """Steps with guesses since the last one without."""
        self._known = 0
        """Tokens of the step before, without guesses."""

    def propose(self, step: Step, budget: Budget) -> None:
        self._asking = 0.0
        self._in_step.clear()
        if len(step) >= FULL:
            return
        # At every step: loops, which take a quarter of the time of generators.
        known, adapts = 0, True
        for chunk in step:
            if chunk.is_prompt:
                return
            known += chunk.count
            # Nobody is held up who did not ask for it.
            adapts = adapts and chunk.sequence.request.speculate == ADAPT and chunk.takes_guesses
        room = min(budget.tokens - known, budget.rows - len(step))
        if adapts:
            if largest := self._costs.largest:
                self._adapt(step, known, min(room, MAX_GUESSES - known, 2 * largest - known))
            return
        for chunk in step:
            count = chunk.sequence.request.speculate if chunk.takes_guesses else 0
            if count > 0 and (most := min(count, room, chunk.sequence.room - 1)) > 0:
                chunk.draft = self._guess(chunk.sequence, most)
                room -= len(chunk.draft)

    def _guess(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """So many tokens as the best source has, whatever they cost."""
        guess = self._look_up(sequence, count)
        if guess.confidence < MODEL:
            found = (each.guess(sequence, count) for each in self._models)
            guess = next((each for each in found if each is not None), guess)
        return guess.tokens[:count]

    def _look_up(self, sequence: TokenSequence, count: int) -> Guess:
        for each in self._lookups:
            if (guess := each.guess(sequence, count)) is not None:
                return guess
        return NOTHING

    def _adapt(self, step: Step, known: int, room: int) -> None:
        """Guess as far as the step gives more tokens a second by it, and as every reply in it can afford."""
        replies = self._in_step
        for chunk in step:
            sequence = chunk.sequence
            reply = self._replies.get(sequence) or self._begin(sequence, known)
            self._count(reply, sequence)
            most = min(MAX_GUESSES - 1, sequence.room - 1)
            if len(reply.guess.tokens) < most // 2 or most < 1:
                reply.guess = self._look_up(sequence, most) if most > 0 else NOTHING
            replies.append(reply)
        if room <= 0 or self._is_due(known):
            return
        if len(step) == 1 and not self._models and self._is_hopeless(reply, known):
            return
        credit = min([self._credit(reply, known) for reply in replies])
        chances: list[tuple[float, int]] = []
        evidence = 0.0
        for at, (chunk, reply) in enumerate(zip(step, replies, strict=True)):
            chance, seen = self._choose(chunk, reply, known, len(step), credit, room)
            evidence = max(evidence, seen)
            if chance:
                chances += [(-(chance**ahead), at) for ahead in range(1, self._most(reply) + 1)]
        if not chances:
            return
        # The likeliest first: of one reply they fall from guess to guess.
        chances.sort()
        _, count = self._best([-minus for minus, _ in chances[:room]], known, len(step), credit, evidence)
        lengths = [0] * len(step)
        for _, at in chances[:count]:
            lengths[at] += 1
        for chunk, reply, length in zip(step, replies, lengths, strict=True):
            chunk.draft = reply.guess.tokens[:length]

    def _credit(self, reply: GuessedReply, known: int) -> float:
        """What it may lose now: one wrong guess more where its text is known."""
        return reply.credit + self._start(known) if reply.evidence >= KNOWN else reply.credit

    def _is_due(self, known: int) -> bool:
        """Whether it is time for a step without guesses."""
        if self._in_a_row < IN_A_ROW:
            return False
        plain = self._costs.seconds(known)
        return self._in_a_row * plain >= IN_A_ROW * (plain + 2 * self._costs.change)

    def _most(self, reply: GuessedReply) -> int:
        """How many guesses a reply may have in a step: of what is looked up, before that has saved anything
        or the text is known, as many as were right in a row up to there."""
        guesses = len(reply.guess.tokens)
        if reply.saved > 0 or reply.guess.source in self._records or reply.evidence >= KNOWN:
            return guesses
        return min(reply.run, guesses)

    def _is_hopeless(self, reply: GuessedReply, known: int) -> bool:
        """Whether any number of guesses for a reply would take longer than it saves. That is soon said, and
        so of most steps where nothing is guessed."""
        guess, costs = reply.guess, self._costs
        if costs.is_change(known):
            return False
        if not guess.tokens:
            return True
        record = reply.records.get(guess.source)
        chance = guess.confidence if record is None else record.chance(guess.confidence)
        least = costs.seconds(known + 1) + 2 * costs.change / (1 + reply.evidence)
        return costs.seconds(known) <= WORTH * least * (1 - chance)

    def _choose(
        self, chunk: Chunk, reply: GuessedReply, known: int, streams: int, credit: float, room: int
    ) -> tuple[float, float]:
        """Have a guess for a reply, by what promises most: how likely each token of it is right, and how many
        were lately."""
        sequence, costs = chunk.sequence, self._costs
        most = min(MAX_GUESSES - 1, sequence.room - 1)
        if most < 1:
            return 0.0, 0.0
        record = reply.records.setdefault(reply.guess.source, GuessRecord())
        chance, evidence = record.chance(reply.guess.confidence), reply.evidence
        best = 0.0
        if guesses := min(room, self._most(reply)):
            ahead = [chance**at for at in range(1, guesses + 1)]
            best, count = self._best(ahead, known, 1, credit, evidence)
            best = best if count else 0.0
        for source in self._models:
            seen = self._records.setdefault(source.name, GuessRecord())
            likely = seen.chance(MODEL)
            price = self._price(source.name)
            ahead = [likely**at for at in range(1, min(room // streams, most) + 1) for _ in range(streams)]
            rate, count = self._best(ahead, known, streams, credit, seen.right, price)
            count //= streams
            cost = costs.seconds(known + streams) - costs.seconds(known) + streams * price + 2 * costs.change
            if not count and not best and SHARE * self._unasked.get(source.name, 0.0) > cost:
                # Now and then it is tried all the same: the text may have changed.
                rate, count = 0.0, 1
            if count and rate >= best:
                guess = self._ask(source, sequence, count)
                if guess is not None:
                    reply.guess, chance, evidence, best = guess, likely, seen.right, rate
        return chance, evidence

    def _best(
        self,
        chances: Sequence[float],
        known: int,
        streams: int,
        credit: float,
        evidence: float,
        price: float = 0.0,
    ) -> tuple[float, int]:
        """The most tokens a second that guesses with these chances give, and how many those are."""
        costs, plain, tokens, count = self._costs, self._costs.seconds(known), float(streams), 0
        change = 2 * costs.change / (1 + evidence)
        # To go back is no loss where it is only a matter of time.
        best = WORTH * tokens / (plain + change * costs.is_change(known) * (evidence >= 1))
        for at, chance in enumerate(chances, 1):
            tokens += chance
            if at not in SIZES:
                continue
            seconds = costs.seconds(known + at) + at * price
            if seconds - plain > credit:
                break
            rate = tokens / (seconds + change * costs.is_change(known + at))
            if rate > best:
                best, count = rate, at
        return best, count

    def _ask(self, source: GuessSource, sequence: TokenSequence, count: int) -> Guess | None:
        """A guess of a model, and what it takes."""
        self._unasked[source.name] = 0.0
        started = self._clock()
        guess = source.guess(sequence, count)
        took = self._clock() - started
        if guess is None or not guess.tokens:
            self._asking += took
            return None
        if (prices := self._prices.get(source.name)) is None:
            # As with steps, the first one says nothing.
            self._prices[source.name] = deque(maxlen=WINDOW)
        else:
            prices.append(took / len(guess.tokens))
            self._asking += self._price(source.name) * len(guess.tokens)
        return guess

    def _price(self, source: str) -> float:
        # One alone may have been held up.
        prices = self._prices.get(source, ())
        return statistics.median_low(prices) if len(prices) > 1 else 0.0

    def _count(self, reply: GuessedReply, sequence: TokenSequence) -> None:
        """Count how the last guess for a reply turned out."""
        if not reply.guess.tokens:
            reply.start = len(sequence.tokens)
            return
        source = reply.guess.source
        right, wrong = reply.compare(sequence.tokens)
        if right or wrong:
            record = self._records.get(source) or reply.records.get(source)
            if record is None:
                record = reply.records[source] = GuessRecord()
            record.add(right, wrong=wrong)

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from a step that was computed and drawn from in so many seconds."""
        if len(step) >= FULL:
            return
        costs = self._costs
        known = size = 0
        for chunk in step:
            if chunk.is_prompt:
                costs.leave()
                self._known = 0
                return
            known += chunk.count
            size += chunk.count + len(chunk.draft)
        plain = costs.seconds(known)
        if plain:
            took = costs.believed(size, seconds) + self._asking
            for source in self._models:
                self._unasked[source.name] = self._unasked.get(source.name, 0.0) + took
            # A change of size that there would not have been without guesses, or the other way round.
            changes = costs.is_change(size) - (known != self._known)
            if size > known or self._in_a_row or self._asking:
                for at, chunk in enumerate(step):
                    gained = plain * (1 + chunk.agreed)
                    chunk.sequence.saved += gained - seconds - self._asking
                    if self._in_step:
                        saved = gained - took - changes * costs.change
                        self._in_step[at].saved += saved
                        self._in_step[at].credit += SHARE * took + saved
            else:
                for reply in self._in_step:
                    reply.credit += SHARE * took
        self._in_a_row = self._in_a_row + 1 if size > known else 0
        self._known = known
        self._in_step.clear()
        costs.observe(size, seconds)

    def _begin(self, sequence: TokenSequence, known: int) -> GuessedReply:
        reply = self._replies[sequence] = GuessedReply(self._start(known))
        reply.start = len(sequence.tokens)
        return reply

    def _start(self, known: int) -> float:
        """The credit of a new reply, for two wrong guesses: each a change of size and back, and what a model
        writes ahead, or a token more. A sequence with anything left may make one."""
        costs = self._costs
        if self._models:
            return 2 * (costs.seconds(known) + 2 * costs.change)
        return costs.seconds(known + 1) - costs.seconds(known) / 2 + 2 * costs.change

    def forget(self, sequence: TokenSequence) -> None:
        self._replies.pop(sequence, None)
        for source in (*self._lookups, *self._models):
            source.forget(sequence)

    def close(self) -> None:
        for source in (*self._lookups, *self._models):
            source.close()
