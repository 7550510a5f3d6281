"""Drafting and verifying at the same time (PEARL, Liu et al. 2024; AMUSD, McDanel 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parlay.drafters.draft_models.beside import Chain, DraftResource, ModelBeside, ServiceBeside
from parlay.drafters.draft_models.chains import Sight
from parlay.drafters.options import PARALLEL_DRAFT as SOURCE
from parlay.drafters.options import ParallelDraftOptions
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView, trees

_LEAST = 2
"""Tokens that are drafted during a forward: the first one stands for what the forward commits after its draft."""
_MOST = 1024  # that a draft model writes in one go
_FIRST = 4  # as many, while the speeds are not known
_NEWEST = 0.2  # weight of the newest measurement of a speed
_EXPECTED, _SUPPOSED = 0.7, 4.0  # share of guesses that are right, while few were tested, and its weight in tokens
_KEPT = 0.98  # weight of older tokens, for each that is tested
_SURE = 0.98  # share beyond which no guess counts as right
_SPARE = 0.25  # part of a token by which a forward may be too short for it


class ParallelDraft:
    """PEARL (Liu et al. 2024, arXiv:2408.11850) and AMUSD (McDanel 2024, arXiv:2410.17375): drafts during forwards.

    *Post-verify*: while the target verifies a draft, the draft model goes on from the end of it, as if all of it were
    right. The first token that it writes there stands for the one that the target adds, so if the draft and that token
    are right, the rest is the next draft, already there. *Pre-verify*: where they are not, the next forward has no
    draft: it yields the token that the first of the next draft is compared with, while that is written. So a step
    takes as long as the slower of the two, once a text has begun.

    With ``form=pearl`` as many tokens are written during a forward as ``ahead`` says, or as the ratio of both speeds
    does, and the next step waits for them. In the latter case the next draft is written first where that is expected to
    be quicker than pre-verify, as it is with a small draft model that is often wrong. With ``form=amusd`` writing ends
    when the forward does. The text is that of plain decoding whatever is drafted when: each token's noise is keyed by
    its position.
    """

    needs = Needs(outcomes=False, beside=True)

    def __init__(
        self, resources: Resources, options: ParallelDraftOptions, *, drafting: DraftResource | None = None
    ) -> None:
        """``drafting`` takes the place of the model or the service that the options name."""
        if options.ahead and options.form == "amusd":
            raise UsageError(f"strategy {SOURCE}: form=amusd drafts until a forward ends; leave out ahead")
        where = ServiceBeside if options.url else ModelBeside
        self._drafting: DraftResource = drafting or where(resources, options)
        self._pace, self._stops = _Pace(options), options.form == "amusd"
        self._guesses: dict[int, _Guess] = {}
        self._flying: list[_Guess] = []
        self._failed: dict[int, Exception] = {}

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """Propose what was drafted during the last forward, and go on drafting."""
        self._land(views)
        asked = {place: views[place] for place, budget in enumerate(budgets) if budget > 0}
        for view in asked.values():
            if view.sequence in self._failed:
                raise self._failed[view.sequence]
        guesses = {place: self._follow(view) for place, view in asked.items()}
        self._draft_first([(guess, budgets[place]) for place, guess in guesses.items() if not guess.rest])
        drafts = [NO_DRAFT] * len(views)
        for place, guess in guesses.items():
            drafts[place] = guess.draft(budgets[place])
        self._take_off([(guess, budgets[place]) for place, guess in guesses.items()])
        return drafts

    def _land(self, views: Sequence[SequenceView]) -> None:
        """End what is drafted beside the target: at once where no text can use it."""
        if not self._flying:
            return
        flying, self._flying = self._flying, []
        now = {view.sequence: view.tokens for view in views}
        useful = any(guess.hopeful(now.get(guess.sight.sequence)) for guess in flying)
        written = self._drafting.end(stop=self._stops or not useful)
        self._pace.learn(written.apart, written.seconds)
        for guess in flying:
            if written.error is not None:
                self._failed[guess.sight.sequence] = written.error
            guess.extend(written.chains.get(guess.sight.sequence, _NOTHING))

    def _follow(self, view: SequenceView) -> _Guess:
        """Bring the guess of a text up to date."""
        guess = self._guesses.get(view.sequence)
        if guess is None:
            guess = self._guesses[view.sequence] = _Guess(Sight(view, list(view.tokens)), len(view.tokens))
        self._pace.learn_outcome(*guess.follow(view))
        guess.was_ahead &= self._drafting.beside(guess.sight)
        return guess

    def _draft_first(self, guesses: Sequence[tuple[_Guess, int]]) -> None:
        """Draft while nothing else runs: in a text's first step, after a pause, and where that is better than to wait.

        The others' next forward runs without a draft.
        """
        wanted: list[tuple[_Guess, int]] = []
        for guess, budget in guesses:
            length = guess.room(self._pace.before(budget) if guess.was_ahead else budget)
            if length > 0:
                wanted.append((guess, length))
        if wanted:
            written = self._drafting.write([guess.sight for guess, _ in wanted], [length for _, length in wanted])
            self._pace.learn_alone(written.seconds)
            for guess, _ in wanted:
                guess.extend(written.chains.get(guess.sight.sequence, _NOTHING))

    def _take_off(self, guesses: Sequence[tuple[_Guess, int]]) -> None:
        """Go on from the ends of these guesses while the target verifies."""
        flying: list[tuple[_Guess, int]] = []
        for guess, budget in guesses:
            most = min(budget + 1, _MOST if self._stops else self._pace.tokens)
            length = guess.room(max(_LEAST, most) - (len(guess.rest) - guess.drafted))
            if length > 0 and self._drafting.beside(guess.sight):
                flying.append((guess, length))
        if flying:
            self._drafting.begin([guess.sight for guess, _ in flying], [length for _, length in flying])
            self._flying = [guess for guess, _ in flying]
            for guess in self._flying:
                guess.was_ahead = True

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learns nothing here: `propose` compares what was guessed with the committed tokens."""

    def release(self, sequence: int) -> None:
        """Forget the sequence. If it is drafted for at this moment, that ends first, for all that are."""
        if any(guess.sight.sequence == sequence for guess in self._flying):
            self._land([guess.sight.view for guess in self._flying if guess.sight.sequence != sequence])
        self._guesses.pop(sequence, None)
        self._failed.pop(sequence, None)
        self._drafting.release(sequence)


_NOTHING = Chain()


@dataclass(slots=True, eq=False)
class _Guess:
    """A text as it will be if the drafter is right: ``start`` tokens of the sight are committed, the rest is guessed.

    ``scores`` are those of the guessed tokens, ``drafted`` how many of these the target was shown. ``was_ahead``:
    something was drafted for it during the last forward.
    """

    sight: Sight
    start: int
    scores: list[float] = field(default_factory=list)
    drafted: int = 0
    was_ahead: bool = False

    @property
    def rest(self) -> list[int]:
        """The guessed tokens."""
        return self.sight.tokens[self.start :]

    def hopeful(self, tokens: Sequence[int] | None) -> bool:
        """Whether what is drafted behind the guess may be of use, now that these tokens are committed."""
        if tokens is None:
            return False
        rest = self.rest
        new = list(tokens[self.start : self.start + len(rest)])
        return new == rest[: len(new)]

    def follow(self, view: SequenceView) -> tuple[int, int]:
        """Keep what agrees with the text as it is now; if that is nothing, the guess ends where the text does.

        Returns how many guessed tokens were right, and how many were tested.
        """
        tokens, self.sight.view = view.tokens, view
        start = min(self.start, len(tokens))
        new, rest = list(tokens[start:]), self.sight.tokens[start:]
        right = next((place for place, (one, other) in enumerate(zip(new, rest, strict=False)) if one != other), -1)
        self.was_ahead &= len(new) <= self.drafted + 1  # a forward commits no more: otherwise there was a pause
        if start == self.start and rest[: len(new)] == new:
            del self.scores[: len(new)]
        else:
            self.sight.tokens[start:] = new
            self.scores.clear()
        self.start = len(tokens)
        return (min(len(new), len(rest)),) * 2 if right < 0 else (right, right + 1)

    def extend(self, chain: Chain) -> None:
        """Guess that these tokens follow."""
        self.sight.tokens += chain.tokens
        self.scores += chain.scores

    def draft(self, budget: int) -> Draft:
        """The first guessed tokens, for the target to verify."""
        tokens = self.rest[:budget]
        self.drafted = len(tokens)
        scores = self.scores[: len(tokens)] if len(self.scores) >= len(tokens) else ()
        return trees.chain(tokens, SOURCE, scores)

    def room(self, length: int) -> int:
        """Cut ``length`` to the tokens that the request may have behind what is guessed."""
        most, sight = self.sight.request.params.max_tokens, self.sight
        return length if most is None else min(length, most - (len(sight.tokens) - sight.prompt_length))


class _Pace:
    """How many tokens to draft during a forward, and before one where there is no draft, by what is measured.

    During a forward as many as fit into one, as PEARL does, unless their number is set.
    """

    def __init__(self, options: ParallelDraftOptions) -> None:
        self._set, self._measures = options.ahead, not options.ahead and options.form == "pearl"
        self._forward = self._token = self._alone = 0.0  # seconds; of a token beside a forward, and while nothing runs
        self._right, self._tested = _EXPECTED * _SUPPOSED, _SUPPOSED

    @property
    def tokens(self) -> int:
        if self._set:
            return self._set
        return max(_LEAST, int(self._forward / self._token + _SPARE)) if self._token and self._forward else _FIRST

    def before(self, budget: int) -> int:
        """How many tokens to draft before a forward for which none are there. 0: it runs meanwhile, without a draft.

        With a draft ready, a step takes one forward, and leaves the next one ready if all tokens are right. Each choice
        is rated by the tokens and the seconds until no draft is ready again.
        """
        if not self._measures or not self._forward:
            return 0
        chance, ready = min(_SURE, self._right / self._tested), min(budget, self.tokens - 1)
        step = max(self._forward, self.tokens * self._token)
        steps = 1 / (1 - chance ** (ready + 1))  # that begin with a draft, one after another, on average
        rates = [(1 + chance * steps * _tokens(chance, ready)) / (step * (1 + chance * steps))]
        for drafted in range(1, budget + 1):
            all_right = chance ** (drafted + 1)
            tokens = _tokens(chance, drafted) + all_right * steps * _tokens(chance, ready)
            rates.append(tokens / (drafted * (self._alone or self._token) + step * (1 + all_right * steps)))
        return rates.index(max(rates))

    def learn(self, forward: float, token: float) -> None:
        """A forward took so long, and a token drafted beside it; 0: not known."""
        if forward > 0 and token > 0:
            self._forward, self._token = _newer(self._forward, forward), _newer(self._token, token)

    def learn_alone(self, token: float) -> None:
        """A token drafted while nothing ran took so long; 0: not known."""
        self._alone = _newer(self._alone, token) if token > 0 else self._alone

    def learn_outcome(self, right: int, tested: int) -> None:
        """So many of the guessed tokens that were tested were right."""
        self._right, self._tested = _KEPT**tested * self._right + right, _KEPT**tested * self._tested + tested


def _newer(known: float, measured: float) -> float:
    return known + _NEWEST * (measured - known) if known else measured


def _tokens(chance: float, drafted: int) -> float:
    """Tokens of a step on average whose draft has so many, each right with this chance."""
    return float((1 - chance ** (drafted + 1)) / (1 - chance))
