"""The speculator: whose next tokens are guessed, how far, and by which drafter.

A request asks for a fixed number of guesses a step, or leaves it to what was measured (`ADAPT`): how often
the guesses of its stream were right, and how long steps of so many tokens take. A stream starts with a little
credit in time, and with more where guessing has paid off for those before it. Wrong guesses use it up; right
ones, and the stream's own steps, earn some. Without credit nothing is guessed: so no stream loses more than
half a hundredth of its time and that first credit, whatever it writes and whoever else guesses beside it.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from perdure.decode.scheduler import Budget, Chunk, Step
from perdure.decode.sequence import TokenSequence
from perdure.decode.speculation.drafter import Draft, Drafter
from perdure.request_options import ADAPT, MAX_GUESSES

log = logging.getLogger("perdure.decode")

FULL = 16
"""Streams of a step from which on nothing is guessed: the engine is busy with those."""
_TOKENS = 32
"""Tokens of a step with guesses, at most, unless a request asks for more."""
_SHARE = 0.005
"""Of a stream's time that it may lose to wrong guesses."""
_START = 1.0
"""Credit of a new stream, in steps, at most."""
_CHANCES = 4
"""How many wrong guesses that credit is for: they cost little on a GPU."""
_MORE = 2.0
"""What it may have besides, in steps: as much as guesses of models have saved lately, for all streams. What
n-grams have saved says little of another text."""
_LATELY = 0.98
"""What is left of that at the next step with guesses."""
_MOST = 32.0
"""Credit that a stream can gather, in steps."""
_WORTH = 1.02
"""How much more a step with guesses must promise."""
_MODEL = 0.7
"""How likely a guess of a model is taken to be right before any was."""
_DEAREST = 5
"""Guesses of a model for a step, at most."""
_UNLIKELY = 0.02
"""Chance under which a guess is not worth weighing."""
_DOUBTFUL = 0.68
"""Confidence up to which the next drafter is asked too."""
_LENGTHS = frozenset((1, 2, 3, 5, 7, 11, 15, 23, 31))
"""Guesses of a step: few sizes, each of which a GPU prepares once, are measured sooner."""
_SLOWER, _FASTER = 0.2, 0.5
"""How much of what a step took longer, or shorter, than known is believed."""
_UNCHECKED, _UNCHECKED_GOOD = 2, 8
"""Steps with guesses that brought little, after which one goes without: what they save is measured by it.
And where guesses have saved more than a step lately."""
_TRIES = 4
"""Steps of each size that a GPU is given to prepare, and to show what such a step takes from then on."""
_TRIED = (1, 2, 3, 5, 7, 15, 31)
"""Guesses of those steps."""
_STAY, _STAY_DEAR = 8, 32
"""Steps of one size that are expected to follow each other; and where a model guesses, whose chance to be
right changes little from step to step."""
_PRIOR, _PRIOR_DEAR = 2, 6
"""Guesses as which the outcomes of all streams count for one of them; and those of a model."""
_DEAR = 0.02
"""Of a step: what takes longer than that to guess a token is asked only where that promises to pay off."""
_UNKNOWN = 0.1
"""What twice as many tokens are taken to cost more, as a part of a step, before that was measured."""
_MEMORY = 0.9
"""What is left of a measured outcome at the next."""


class StepCosts:
    """How long steps of so many tokens take, as measured, and what it costs to change the size.

    The first step of a size says nothing: a GPU prepares what it needs for that size then, and takes many
    times as long as it will from then on. Of the next ones the fastest counts. Later too a GPU that comes
    back to a size launches the first step bit by bit and records the second: that is the cost of the change,
    and not of steps of that size.
    """

    def __init__(self, slow_steps: int = 1) -> None:
        """So many steps of a size may take longer than the ones that follow them."""
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._last = 0
        self._run = 0
        """Steps of that size in a row."""
        self._excess = [0.0] * slow_steps
        """What the first steps of such a run take longer."""

    def observe(self, tokens: int, seconds: float) -> None:
        self._run = self._run + 1 if tokens == self._last else 1
        self._last = tokens
        count = self._counts[tokens] = self._counts.get(tokens, 0) + 1
        before = self._seconds.get(tokens)
        if count == 1:
            return
        if before is None:
            self._seconds[tokens] = seconds
        elif count <= _TRIES:
            self._seconds[tokens] = min(before, seconds)
        elif self._run <= len(self._excess) and seconds > before:
            excess = self._excess[self._run - 1]
            self._excess[self._run - 1] += _SLOWER * (min(seconds - before, 2 * before) - excess)
        else:
            # A step can be held up by something else, and then says little; none is faster than it can be.
            share = _SLOWER if seconds > before else _FASTER
            self._seconds[tokens] = before + share * (min(seconds, 2 * before) - before)

    def leave(self) -> None:
        """A prompt was read: the next step is the first of its size, whichever that is."""
        self._last = self._run = 0

    def change(self, tokens: int, stay: int = _STAY) -> float:
        """What a step of so many tokens takes longer than others of its size, if it comes next: its part of
        the way there and back, since so many steps are expected to stay at that size."""
        return 2 * self.first_steps / stay if tokens != self._last else 0.0

    @property
    def first_steps(self) -> float:
        """What the first steps of a size take longer, together."""
        return sum(self._excess)

    def tries(self, tokens: int) -> int:
        """How many steps of so many tokens there were."""
        return self._counts.get(tokens, 0)

    def believed(self, tokens: int, seconds: float) -> float:
        """What is believed of a step that took so long: at most twice what such a step is known to take. The
        rest is none of its tokens' doing."""
        return min(seconds, 2 * self.seconds(tokens)) if self._seconds else seconds

    def known(self, tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None where there was none yet."""
        return self._seconds.get(tokens)

    @property
    def largest(self) -> int:
        """The most tokens of a step that was measured."""
        return max(self._seconds, default=0)

    def seconds(self, tokens: int) -> float:
        """The same, estimated from the nearest where there was none."""
        if (known := self._seconds.get(tokens)) is not None:
            return known
        below = max((size for size in self._seconds if size < tokens), default=None)
        above = min((size for size in self._seconds if size > tokens), default=None)
        if below is None:
            return self._seconds[above] if above is not None else 0.0
        low = self._seconds[below]
        if above is None:
            before = max((size for size in self._seconds if size < below), default=None)
            rise = 0.0 if before is None else (low - self._seconds[before]) / (below - before)
            return low + (tokens - below) * max(rise, _UNKNOWN * low / below)
        part = (tokens - below) / (above - below)
        return low + part * max(0.0, self._seconds[above] - low)


class Prices:
    """How long a guess of each drafter takes, as measured.

    The first ones say nothing where an engine prepares what it computes: of these the fastest counts.
    """

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def price(self, source: str) -> float:
        """Seconds of a guess; 0 where none is known."""
        return self._seconds.get(source, 0.0) if self._counts.get(source, 0) >= self._tries else 0.0

    @property
    def highest(self) -> float:
        """Of the drafters that were asked so far."""
        return max(map(self.price, self._seconds), default=0.0)

    def charge(self, source: str, guesses: int, seconds: float) -> float:
        """Learn what a draft took; what of it its stream pays for."""
        each, count = seconds / guesses, self._counts.get(source, 0) + 1
        self._counts[source] = count
        before = self._seconds.get(source, each)
        if count <= self._tries:
            self._seconds[source] = each if count == 1 else min(before, each)
            return 0.0 if self._tries > 1 else seconds
        self._seconds[source] = before + (_SLOWER if each > before else _FASTER) * (
            min(each, 2 * before) - before
        )
        return min(seconds, 2 * before * guesses)


class Outcomes:
    """How many guesses were right, by drafter, and how many were the first wrong one. The last ones count
    most."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._right: dict[str, float] = {}
        self._wrong: dict[str, float] = {}

    def chance(self, source: str, expected: float, weight: int) -> float:
        """That a guessed token is right whose forerunners are, where so much was expected beforehand; that
        counts as so many guesses do."""
        right, wrong = self._right.get(source, 0.0), self._wrong.get(source, 0.0)
        return (right + weight * expected) / (right + wrong + weight)

    def add(self, source: str, guesses: int, agreed: int) -> None:
        self._right[source] = self._right.get(source, 0.0) * self._memory + agreed
        self._wrong[source] = self._wrong.get(source, 0.0) * self._memory + (agreed < guesses)


class _Stream:
    """What was measured of one sequence."""

    def __init__(self, credit: float) -> None:
        self.credit = credit
        """Seconds that it may lose."""
        self.outcomes = Outcomes(_MEMORY)


class Speculator:
    """Adds drafts to steps, in the engine thread."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        n_ctx: int,
        prepares: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The drafters are asked in their order, until one has a good guess.

        An engine that `prepares` each size of a step is given some steps of each, at nobody's cost, before
        it is judged: as a GPU, for which a few large steps are a matter of milliseconds.
        """
        self._clock = clock
        self._drafters = list(drafters)
        self._n_ctx = n_ctx
        self._streams: WeakKeyDictionary[TokenSequence, _Stream] = WeakKeyDictionary()
        self._costs = StepCosts(slow_steps=2 if prepares else 1)
        self._prepares = prepares
        self._trying = False
        """Whether the step in flight is such a one."""
        self._guessed = False
        """Whether the step before had guesses."""
        self._sources: dict[Chunk, str] = {}
        """Of the drafts in the step in flight."""
        self._asking = 0.0
        """Seconds that guessing has taken for it."""
        self._outcomes = Outcomes(_LATELY)
        """Of all streams."""
        self._gain = 0.0
        """Steps that guesses of models have saved lately."""
        self._prices = Prices(_TRIES if prepares else 1)
        self._unpaid = 0
        """Steps with guesses in a row that brought less than a token for each stream."""

    def add_drafts(self, step: Step, budget: Budget) -> None:
        """Put guesses behind the last tokens of replies, where they are asked for or pay off."""
        self._sources = {}
        self._asking = 0.0
        self._trying = False
        if len(step) >= FULL:
            return
        fixed: list[Chunk] = []
        adaptive: list[Chunk] = []
        known = 0
        for chunk in step:
            known += chunk.count
            sequence = chunk.sequence
            if chunk.is_prompt or sequence.cached < sequence.alone_until:
                continue
            setting = sequence.request.speculate
            if setting > 0:
                fixed.append(chunk)
            elif setting == ADAPT:
                adaptive.append(chunk)
        if not fixed and not adaptive:
            return
        room = min(budget.tokens - known, budget.rows - len(step))
        for chunk in fixed:
            draft = self._ask(chunk, min(chunk.sequence.request.speculate, room))
            if draft is not None:
                chunk.draft = draft.tokens
                self._sources[chunk] = draft.source
                room -= len(draft.tokens)
        if adaptive and not fixed and len(adaptive) == len(step):
            self._adapt(adaptive, known, min(room, _TOKENS - known))

    def _adapt(self, chunks: Sequence[Chunk], known: int, room: int) -> None:
        """Guess as far as a step gives more tokens a second by it, and as everybody in it can afford."""
        plain = self._costs.known(known)
        unchecked = _UNCHECKED_GOOD if self._gain > 1 else _UNCHECKED
        if plain is None or self._unpaid >= unchecked or room <= 0:
            return
        streams = [self._stream(chunk.sequence, known, plain) for chunk in chunks]
        credit = min(stream.credit for stream in streams) + self._lent(plain)
        if self._costs.seconds(known + 1) - plain > credit and not self._has_untried(chunks, known):
            return
        drafts: dict[Chunk, Draft] = {}
        stay = _STAY
        chances: list[tuple[float, int, Chunk]] = []
        for at, (chunk, stream) in enumerate(zip(chunks, streams, strict=True)):
            paying = functools.partial(self._guesses_that_pay, stream, known, len(chunks))
            draft = self._ask(chunk, min(MAX_GUESSES, room), paying)
            if draft is None:
                continue
            drafts[chunk] = draft
            if dear := self._is_dear(draft.source, plain):
                stay = _STAY_DEAR
            chance, each = 1.0, self._chance(stream, draft.source, draft.confidence, dear=dear)
            for _ in draft.tokens:
                chance *= each
                if chance < _UNLIKELY:
                    break
                chances.append((-chance, at, chunk))
        if len(chunks) == 1 and self._try_out(chunks[0], drafts.get(chunks[0]), known):
            return
        # What a step costs that is larger than any before is found out by and by.
        room = min(room, 2 * self._costs.largest - known)
        # The likeliest first: of one stream they fall from guess to guess.
        if len(chunks) > 1:
            chances.sort(key=lambda entry: entry[:2])
        tokens, count = float(len(chunks)), 0
        best = tokens / (plain + self._costs.change(known, stay)) * _WORTH
        for at, (minus, _, _) in enumerate(chances[: max(0, room)], 1):
            tokens -= minus
            if at not in _LENGTHS:
                continue
            seconds = self._costs.seconds(known + at)
            if seconds - plain > credit:
                break
            rate = tokens / (seconds + self._costs.change(known + at, stay))
            if rate > best:
                best, count = rate, at
        lengths: dict[Chunk, int] = {}
        for _, _, chunk in chances[:count]:
            lengths[chunk] = lengths.get(chunk, 0) + 1
        for chunk, length in lengths.items():
            chunk.draft = drafts[chunk].tokens[:length]
            self._sources[chunk] = drafts[chunk].source

    def _is_dear(self, source: str, plain: float) -> bool:
        """Whether a drafter takes its time to guess, beside a step that takes so long: as a model does."""
        return self._prices.price(source) > _DEAR * plain

    def _chance(self, stream: _Stream, source: str, expected: float, *, dear: bool) -> float:
        """That a token is right that a drafter guesses for a stream, whose forerunners are."""
        among_all = self._outcomes.chance(source, expected, _PRIOR)
        return stream.outcomes.chance(source, among_all, _PRIOR_DEAR if dear else _PRIOR)

    def _has_untried(self, chunks: Sequence[Chunk], known: int) -> bool:
        """Whether there are sizes that the engine has still to prepare, and this may be a step of one."""
        return (
            self._prepares
            and len(chunks) == 1
            and any(self._costs.tries(known + count) < _TRIES for count in _TRIED)
        )

    def _try_out(self, chunk: Chunk, draft: Draft | None, known: int) -> bool:
        """Whether this step is one of a size that the engine has still to prepare."""
        if not self._prepares or draft is None:
            return False
        for count in _TRIED:
            if count <= len(draft.tokens) and self._costs.tries(known + count) < _TRIES:
                chunk.draft = draft.tokens[:count]
                self._sources[chunk] = draft.source
                self._trying = True
                return True
        return False

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from a step that was computed and drawn from in so many seconds."""
        if len(step) >= FULL:
            return
        known = guesses = 0
        for chunk in step:
            if chunk.is_prompt:
                self._costs.leave()
                return
            known += chunk.count
            guesses += len(chunk.draft)
        if known + guesses > 4 * _TOKENS:
            return
        agreed = sum(chunk.agreed for chunk in step)
        if not guesses or agreed >= len(step):
            self._unpaid = 0
        else:
            self._unpaid += 1
        plain = self._costs.known(known)
        if plain is not None:
            took = self._costs.believed(known + guesses, seconds) + self._asking
            for chunk in step:
                # A guess that was not used has cost its time too, and going back to steps without may.
                has_guessed = guesses > 0 or self._guessed
                saved = plain * (1 + chunk.agreed) - took if has_guessed else -self._asking
                chunk.sequence.saved += saved
                stream = self._streams.get(chunk.sequence)
                if stream is None:
                    continue
                earned = 0.0 if self._trying else _SHARE * took + saved
                stream.credit = min(stream.credit + earned, _MOST * plain)
                if (source := self._sources.get(chunk)) is not None:
                    stream.outcomes.add(source, len(chunk.draft), chunk.agreed)
                    self._outcomes.add(source, len(chunk.draft), chunk.agreed)
                    if self._is_dear(source, plain):
                        if self._trying:
                            # What it will be, once the engine has prepared such steps.
                            asking = self._prices.price(source) * len(chunk.draft)
                            took = self._costs.seconds(known + guesses) + asking
                            saved = plain * (1 + chunk.agreed) - took
                        self._gain = self._gain * _LATELY + saved / plain
        self._guessed = guesses > 0
        self._costs.observe(known + guesses, seconds)

    def forget(self, sequence: TokenSequence) -> None:
        """A sequence has ended."""
        self._streams.pop(sequence, None)
        for drafter in self._drafters:
            drafter.forget(sequence)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()

    def _stream(self, sequence: TokenSequence, known: int, plain: float) -> _Stream:
        stream = self._streams.get(sequence)
        if stream is None:
            guess = max(self._costs.seconds(known + 1) - plain, _DEAR * plain) + self._prices.highest
            stream = self._streams[sequence] = _Stream(min(_START * plain, _CHANCES * guess))
        return stream

    def _lent(self, plain: float) -> float:
        """Seconds that any stream may lose besides its own credit: so many that it can come to steps of
        another size, too."""
        return min(max(0.0, self._gain) * plain, _MORE * plain + self._costs.first_steps)

    def _ask(self, chunk: Chunk, count: int, paying: Callable[[str], int] | None = None) -> Draft | None:
        """The guess of the first drafter that has a good one; else the first. `paying` tells how many guesses
        of a drafter are worth to be asked for."""
        sequence = chunk.sequence
        # The last token that may be written is drawn, never guessed; and the cache has room for so many.
        count = min(count, sequence.room - 1, self._n_ctx - len(sequence.tokens))
        if count < 1:
            return None
        return self._first_guess(sequence, count, paying)

    def _first_guess(
        self, sequence: TokenSequence, count: int, paying: Callable[[str], int] | None
    ) -> Draft | None:
        doubtful: Draft | None = None
        for drafter in list(self._drafters):
            most = count if paying is None else min(count, paying(drafter.name))
            if most < 1:
                continue
            started = self._clock()
            try:
                draft = drafter.draft(sequence, most)
            except Exception:
                # A guess that fails costs nobody a reply.
                log.exception("the drafter %s failed; it is not asked again", drafter.name)
                self._drafters.remove(drafter)
                continue
            took = self._clock() - started
            if draft is None or not len(draft.tokens) or not math.isfinite(draft.confidence):
                self._asking += took
            else:
                draft = draft._replace(tokens=draft.tokens[:most])
                self._asking += self._prices.charge(draft.source, len(draft.tokens), took)
                if draft.confidence > _DOUBTFUL:
                    return draft
                doubtful = doubtful or draft
        return doubtful

    def _guesses_that_pay(self, stream: _Stream, known: int, streams: int, source: str) -> int:
        """How many guesses of a drafter are worth to be asked for, before anything is known of them."""
        plain, price = self._costs.seconds(known), self._prices.price(source)
        if not self._is_dear(source, plain):
            return MAX_GUESSES
        if self._prepares and streams == 1:
            for count in _TRIED:
                if count <= _DEAREST and self._costs.tries(known + count) < _TRIES:
                    return count
        chance = self._chance(stream, source, _MODEL, dear=True)
        credit = stream.credit + self._lent(plain)
        tokens, right, count = 1.0, 1.0, 0
        best = _WORTH / (plain + self._costs.change(known, _STAY_DEAR))
        for at in range(1, _DEAREST + 1):
            right *= chance
            tokens += right
            size = known + at * streams
            seconds = self._costs.seconds(size) + self._costs.change(size, _STAY_DEAR) + at * streams * price
            if seconds - plain > credit:
                break
            if at in _LENGTHS and tokens / seconds > best:
                best, count = tokens / seconds, at
        if not count and credit >= min(_START * plain, _CHANCES * price):
            # Now and then it is tried all the same: the text may have changed.
            return 1
        return count
