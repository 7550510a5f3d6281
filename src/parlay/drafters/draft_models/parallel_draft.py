"""Drafting and verifying at the same time (PEARL, Liu et al. 2024; AMUSD, McDanel 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from parlay.drafters.draft_models.beside import Chain, DraftResource, ModelBeside, ServiceBeside
from parlay.drafters.draft_models.chains import DraftView
from parlay.drafters.draft_models.pace import LEAST, Pace
from parlay.drafters.options import PARALLEL_DRAFT as SOURCE
from parlay.drafters.options import ParallelDraftOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, Needs, SequenceView, trees

_MOST = 1024  # the most tokens that a draft model writes in one go


class ParallelDraft(FromText):
    """PEARL (Liu et al. 2024, arXiv:2408.11850) and AMUSD (McDanel 2024, arXiv:2410.17375): drafts during forwards.

    *Post-verify*: while the target verifies a draft, the draft model continues from its end, as if all of it were
    right. The first of these tokens is a guess of the target's bonus token. If the draft and that guess are right, the
    tokens after it are the next draft, ready at once. *Pre-verify*: if they are not, the next forward has no draft.
    While the draft model writes the next draft, that forward yields the token with which the draft's first token is
    compared. So, once a text has begun, a step takes as long as the slower of target and draft model.

    With ``form=pearl``, the draft model writes ``ahead`` tokens during each forward, and the next step waits for them.
    If ``ahead`` is not set, their number follows from the ratio of both models' speeds. Then, instead of pre-verify,
    the next draft is written first if that is expected to be faster, as with a small draft model that is often wrong.
    With ``form=amusd``, drafting ends when the forward does. ``form=auto`` is ``pearl`` if measurements show that to be
    faster; otherwise all drafts are written before forwards, as by `DraftModel`.

    If the engine verifies the halves of a batch in turn, drafts for one half are written while the other one is
    verified. The half's text is known by then, so no draft is wasted. The text is always that of plain decoding,
    because each token's noise depends only on its position.
    """

    needs = Needs(outcomes=False, beside=True)

    def __init__(
        self, resources: Resources, options: ParallelDraftOptions, *, drafting: DraftResource | None = None
    ) -> None:
        """``drafting`` replaces the model or the service that the options name."""
        if options.ahead and options.form == "amusd":
            raise UsageError(f"strategy {SOURCE}: form=amusd drafts until a forward ends; remove ahead")
        where = ServiceBeside if options.url else ModelBeside
        self._drafting: DraftResource = drafting or where(resources, options)
        self._pace, self._stops = Pace(options), options.form == "amusd"
        self._guesses: dict[int, _Guess] = {}
        self._under_way: list[_Guess] = []
        self._failed: dict[int, Exception] = {}
        self._waiting: Sequence[SequenceView] = ()
        self._last = _Last()

    @property
    def is_drafting(self) -> bool:
        return bool(self._under_way)

    def halves_pay(self, views: Sequence[SequenceView], whole: float, half: float, *, now: bool) -> bool:
        guesses = [self._guesses.get(view.sequence) for view in views]
        if not all(guess is not None and self._drafting.beside(guess.view) for guess in guesses):
            return False
        budgets = [guess.budget for guess in guesses if guess is not None]
        return self._pace.halves_pay(max(budgets), whole, half, now=now)

    def look_ahead(self, views: Sequence[SequenceView]) -> None:
        self._waiting = views

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """Propose what was drafted during the last forward, and continue drafting."""
        took = self._drafting.seconds() - self._last.left
        self._end_drafting(views)
        asked = {place: views[place] for place, budget in enumerate(budgets) if budget > 0}
        for view in asked.values():
            if view.sequence in self._failed:
                raise self._failed[view.sequence]
        guesses = {place: self._follow(view) for place, view in asked.items()}
        for place, guess in guesses.items():
            guess.budget = budgets[place]
        if self._last.was_step_of(guesses.values()):
            self._pace.learn_forward(took, beside=self._last.beside)
        self._draft_first([(guess, budgets[place]) for place, guess in guesses.items() if not guess.rest])
        drafts = [NO_DRAFT] * len(views)
        for place, guess in guesses.items():
            drafts[place] = guess.draft(budgets[place])
        self._begin_drafting(list(guesses.values()))
        return drafts

    def _end_drafting(self, views: Sequence[SequenceView]) -> None:
        """Finish the drafting that began during the forward; at once if no text can use it."""
        if not self._under_way:
            return
        guesses, self._under_way = self._under_way, []
        now = {view.sequence: view.tokens for view in views}
        useful = any(guess.hopeful(now.get(guess.view.sequence)) for guess in guesses)
        written = self._drafting.end(stop=self._stops or not useful)
        self._pace.learn_token(written.seconds, halves=self._last.halves)
        for guess in guesses:
            if written.error is not None:
                self._failed[guess.view.sequence] = written.error
            guess.extend(written.chains.get(guess.view.sequence, _NOTHING))

    def _follow(self, view: SequenceView) -> _Guess:
        """The guess of a text, brought up to date with its committed tokens."""
        guess = self._guesses.get(view.sequence)
        if guess is None:
            guess = self._guesses[view.sequence] = _Guess(DraftView(view, list(view.tokens)), len(view.tokens))
        self._pace.learn_outcome(*guess.follow(view))
        guess.was_ahead &= self._drafting.beside(guess.view)
        return guess

    def _draft_first(self, guesses: Sequence[tuple[_Guess, int]]) -> None:
        """Draft while nothing else runs: in a text's first step, after a pause, and where that is faster than waiting.

        For the other texts, the next forward runs without a draft.
        """
        wanted: list[tuple[_Guess, int]] = []
        for guess, budget in guesses:
            length = guess.room(self._pace.before(budget) if guess.was_ahead else budget)
            if length > 0:
                wanted.append((guess, length))
        if wanted:
            written = self._drafting.write([guess.view for guess, _ in wanted], [length for _, length in wanted])
            chains = [written.chains.get(guess.view.sequence, _NOTHING) for guess, _ in wanted]
            if all(guess.is_read for guess, _ in wanted):  # otherwise most of the time went to prompts
                self._pace.learn_alone(written.seconds, sum(len(chain.tokens) for chain in chains) / len(chains))
            for (guess, _), chain in zip(wanted, chains, strict=True):
                guess.is_read = True
                guess.extend(chain)

    def _begin_drafting(self, guesses: Sequence[_Guess]) -> None:
        """Begin to draft during the target's forward: from the ends of these guesses, or for texts that wait."""
        waiting, self._waiting = self._waiting, ()
        halves = [self._follow(view) for view in waiting if view.sequence in self._guesses]
        halves = [guess for guess in halves if guess.view.sequence not in self._failed]
        begun: list[tuple[_Guess, int]] = []
        if halves:
            begun = [(guess, guess.room(guess.budget - len(guess.rest))) for guess in halves]
        elif guesses and self._pace.drafts_beside(max(guess.budget for guess in guesses)):
            begun = [(guess, self._length_beside(guess)) for guess in guesses]
        begun = [(guess, length) for guess, length in begun if length > 0 and self._drafting.beside(guess.view)]
        if begun:
            self._drafting.begin([guess.view for guess, _ in begun], [length for _, length in begun])
            self._under_way = [guess for guess, _ in begun]
            for guess in self._under_way:
                guess.was_ahead = True
        self._last = _Last(self._drafting.seconds(), frozenset(map(id, guesses)), bool(begun), bool(halves))

    def _length_beside(self, guess: _Guess) -> int:
        """How many tokens to draft after the guess during its own forward."""
        most = min(guess.budget + 1, _MOST if self._stops else self._pace.tokens)
        return guess.room(max(LEAST, most) - (len(guess.rest) - guess.drafted))

    def release(self, sequence: int) -> None:
        """Forget the sequence. If it is being drafted for, the drafting of all texts is finished first."""
        if any(guess.view.sequence == sequence for guess in self._under_way):
            self._end_drafting([guess.view.origin for guess in self._under_way if guess.view.sequence != sequence])
        self._waiting = [view for view in self._waiting if view.sequence != sequence]
        self._guesses.pop(sequence, None)
        self._failed.pop(sequence, None)
        self._drafting.release(sequence)


_NOTHING = Chain()


@dataclass(frozen=True, slots=True)
class _Last:
    """The last call of ``propose``: when it ended, for which guesses, and what drafting it began.

    ``beside``: it began drafting during the forward; ``halves``: for texts that waited for their turn.
    """

    left: float = 0.0
    guesses: frozenset[int] = frozenset()
    beside: bool = False
    halves: bool = False

    def was_step_of(self, guesses: Iterable[_Guess]) -> bool:
        """Whether exactly one forward ran since, over all these texts."""
        known = [guess.stepped and id(guess) in self.guesses for guess in guesses]
        return bool(known) and all(known) and not self.halves


@dataclass(slots=True, eq=False)
class _Guess:
    """A text as it will be if the drafter is right: the first ``start`` tokens are committed, the rest is guessed.

    ``scores``: those of the guessed tokens; ``drafted``: how many of these the target was shown; ``budget``: how many
    it may be shown. ``was_ahead``: tokens were drafted for it during the last forward. ``stepped``: its text had one
    step since `follow` was last called. ``is_read``: the drafter has read its prompt.
    """

    view: DraftView
    start: int
    scores: list[float] = field(default_factory=list)
    drafted: int = 0
    budget: int = 0
    was_ahead: bool = False
    stepped: bool = False
    is_read: bool = False

    @property
    def rest(self) -> list[int]:
        """The guessed tokens."""
        return self.view.tokens[self.start :]

    def hopeful(self, tokens: Sequence[int] | None) -> bool:
        """Whether tokens drafted after the guess may still be useful, now that ``tokens`` are committed."""
        if tokens is None:
            return False
        rest = self.rest
        new = list(tokens[self.start : self.start + len(rest)])
        return new == rest[: len(new)]

    def follow(self, view: SequenceView) -> tuple[int, int]:
        """Keep the guessed tokens that agree with the text; if none do, the guess ends where the text does.

        Returns how many guessed tokens were right, and how many were tested.
        """
        tokens, self.view.origin = view.tokens, view
        start = min(self.start, len(tokens))
        new, rest = list(tokens[start:]), self.view.tokens[start:]
        right = next((place for place, (one, other) in enumerate(zip(new, rest, strict=False)) if one != other), -1)
        self.stepped = 0 < len(new) <= self.drafted + 1
        self.was_ahead &= len(new) <= self.drafted + 1  # a forward commits no more tokens: there was a pause
        if start == self.start and rest[: len(new)] == new:
            del self.scores[: len(new)]
        else:
            self.view.tokens[start:] = new
            self.scores.clear()
        self.start = len(tokens)
        return (min(len(new), len(rest)),) * 2 if right < 0 else (right, right + 1)

    def extend(self, chain: Chain) -> None:
        """Append guessed tokens."""
        self.view.tokens += chain.tokens
        self.scores += chain.scores

    def draft(self, budget: int) -> Draft:
        """The first guessed tokens, as the draft to verify."""
        tokens = self.rest[:budget]
        self.drafted = len(tokens)
        scores = self.scores[: len(tokens)] if len(self.scores) >= len(tokens) else ()
        return trees.chain(tokens, SOURCE, scores)

    def room(self, length: int) -> int:
        """``length``, cut to the tokens that the request may still have after the guess."""
        most, view = self.view.request.params.max_tokens, self.view
        return length if most is None else min(length, most - (len(view.tokens) - view.prompt_length))
