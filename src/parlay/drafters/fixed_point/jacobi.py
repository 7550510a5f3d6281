"""Jacobi decoding (Santilli et al. 2023): guess several tokens, let the target correct all of them at once, repeat."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.fixed_point.ngram_pool import GRAM_BYTES, NgramPool
from parlay.drafters.options import JACOBI as SOURCE
from parlay.drafters.options import JacobiOptions
from parlay.drafters.per_sequence import History, OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.options import refuse_unread
from parlay.sampling import noise
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView, shared_length, trees

_SCORES = (0.16, 0.8, 0.95)
"""Measured probability that a corrected token is right if the one before it is, by how many guesses just before it
stayed the same in its forward: 0, 1, or more. With 0, it was computed after a token that has changed since."""
_FRESH = 0.02  # probability of a guess that no forward has corrected yet
_RECYCLED = (0.3, 0.4)  # measured probabilities: first token of a recycled n-gram, later ones
_PURPOSE = 0x6A61636F6269  # the stream of guesses drawn from a prompt: "jacobi" in ASCII


class Jacobi(OneByOne):
    """Jacobi decoding (Santilli et al. 2023, arXiv:2305.10427): plain decoding as a system of equations.

    Token i of the output is what the target chooses after tokens 1 to i - 1. A block of guesses is verified as a draft.
    At each of its rows, rejected or not, the target chooses a token, and these tokens are the next guesses. Each
    forward makes at least one more token right, so m tokens take at most m forwards. The fixed point is the text of
    plain decoding, greedy or sampled, because the request's own sampler corrects the guesses.

    ``variant`` says how far ahead to guess, always within the budget: ``parallel`` (PJ) to the end of the request;
    ``block`` (PGJ) to the end of the current block of ``block`` tokens; ``hybrid`` (HGJ) the same for the first
    ``bound`` tokens, and nothing after them. In the paper's PJ the budget covers the rest of the request. Where it is
    smaller, new guesses are added at the end as tokens are committed.

    ``guess`` is the first guess of a token: ``pad`` (the paper's), the ``last`` token again, or tokens drawn from the
    ``prompt`` by the request's key. For a target that was tuned to converge in few forwards (CLLM, Kou et al. 2024,
    arXiv:2403.00835) use ``guess=prompt`` with as many guesses as blocks had tokens, and ``recycle``.

    ``recycle`` keeps what such a target predicted in rejected rows. Runs of it are often right some places later, so
    n-grams of earlier guesses that begin with the last committed token are verified, too (rejection recycling;
    Jacobi Forcing, Hu et al. 2025, arXiv:2512.14681). They get at most half of the budget. Where one of them is right
    for longer than the block, the next guesses are what the target chose along it.
    """

    needs = Needs(top_k=1)

    def __init__(self, resources: Resources, options: JacobiOptions) -> None:
        if not options.recycle:
            where = "without recycle=, the number of n-grams: give it"
            refuse_unread(f"strategy {SOURCE}", options, ("ngram",), where)
        pad = resources.tokenizer.pad_token_id if resources.tokenizer is not None else None
        self._pad = pad if isinstance(pad, int) and pad < resources.vocab_size else 0
        self._variant = options.variant
        self._block = options.block
        self._bound = options.bound
        self._guess = options.guess
        self._recycle = options.recycle
        self._ngram = options.ngram
        self._iterates: dict[int, _Iterate] = {}
        self._bytes = StateBytes(resources.room, self._iterates)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        room = self._room(view, budget)
        if room <= 0:
            return NO_DRAFT
        iterate = self._iterates.setdefault(view.sequence, _Iterate(self._recycle, self._ngram))
        iterate.follow(view.tokens)
        self._bytes.set(view.sequence, len(iterate.pool) * GRAM_BYTES)
        iterate.recall(view.tokens[-1])
        size = min(room, budget - min(sum(map(len, iterate.recycled)), budget // 2))
        places = range(len(view.tokens) + len(iterate.tokens), len(view.tokens) + size)
        fresh = [self._first_guess(view, place) for place in places]
        iterate.proposed = iterate.tokens[:size] + fresh
        block = trees.chain(iterate.proposed, SOURCE, iterate.scores[:size] + [_FRESH] * len(fresh))
        return trees.first(trees.merge([block, *map(_again, iterate.recycled)]), budget)

    def _room(self, view: SequenceView, budget: int) -> int:
        """How many more tokens the block has. Its last token needs no guess, because no row of the block follows it."""
        if self._variant == "parallel":
            return budget
        length = len(view.tokens) - view.prompt_length
        room = self._block - length % self._block - 1
        return min(room, self._bound - length - 1) if self._variant == "hybrid" else room

    def _first_guess(self, view: SequenceView, position: int) -> int:
        if self._guess == "pad":
            return self._pad
        if self._guess == "last":
            return view.tokens[-1]
        return view.tokens[noise.stream(view.request.key, position, _PURPOSE) % view.prompt_length]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Make the tokens that the sampler chose along the block the next guesses."""
        for observation in observations:
            iterate = self._iterates.get(observation.view.sequence)
            before = len(observation.view.tokens) - len(observation.verdict.sampled)
            if iterate is not None and len(observation.draft) and len(iterate.history.tokens) == before:
                iterate.learn(observation)

    def release(self, sequence: int) -> None:
        self._iterates.pop(sequence, None)
        self._bytes.release(sequence)


class _Iterate:
    """The latest guess of what follows a text, and a pool of n-grams from earlier guesses."""

    def __init__(self, recycle: int, ngram: int) -> None:
        """The pool keeps ``recycle`` n-grams of ``ngram`` tokens per first token."""
        self.history = History()  # the text
        self.pool = NgramPool(recycle)
        self.recycled: list[tuple[int, ...]] = []  # tails of n-grams in the last draft
        self._ngram = ngram if recycle else 0
        self.tokens: list[int] = []
        self.scores: list[float] = []
        self.proposed: list[int] = []  # the last draft, fresh guesses included

    def follow(self, tokens: Sequence[int]) -> None:
        """Drop guesses for positions that are committed now. If tokens were taken back, drop all guesses."""
        history = self.history
        agreed = history.agree(tokens)
        passed = len(tokens) - agreed if agreed == len(history.tokens) else len(self.tokens)
        history.cut(agreed)
        history.tokens.extend(tokens[agreed:])
        del self.tokens[:passed]
        del self.scores[:passed]

    def recall(self, root: int) -> None:
        """Look up n-grams of earlier guesses that begin with the root, except those that the block repeats."""
        tails = self.pool.after(root)
        self.recycled = [tail for tail in tails if tail != tuple(self.tokens[: len(tail)])]

    def learn(self, observation: Observation) -> None:
        """One iteration: correct the guesses along the block, or along an n-gram that was right for longer."""
        sampled, chosen = observation.verdict.sampled, _along(observation, self.proposed)
        self._correct(chosen, self.proposed)
        best = max(self.recycled, key=lambda tail: shared_length(tail, sampled), default=())
        if shared_length(best, sampled) > shared_length(self.proposed, sampled):
            self._correct(_along(observation, best), best)
        if self._ngram:
            state = [self.history.tokens[-1], *self.tokens[: len(chosen)]]
            for place in range(len(state) - self._ngram + 1):
                self.pool.add(state[place], tuple(state[place + 1 : place + self._ngram]))

    def _correct(self, chosen: Sequence[int], guesses: Sequence[int]) -> None:
        """Replace the guesses by ``chosen``, the sampler's tokens along ``guesses``, as far as the forward went."""
        scores: list[float] = []
        same = 0  # how many guesses just before this one stayed the same, so that it still follows from them
        for place, token in enumerate(chosen):
            scores.append(_SCORES[min(same, 2)])
            same = same + 1 if place < len(guesses) and guesses[place] == token else 0
        self.tokens[: len(chosen)] = chosen
        self.scores[: len(chosen)] = scores


def _again(tail: Sequence[int]) -> Draft:
    return trees.chain(tail, SOURCE, [_RECYCLED[min(place, 1)] for place in range(len(tail))])


def _along(observation: Observation, guesses: Sequence[int]) -> list[int]:
    """The sampler's tokens after the root and after each guess, as far as the verified draft contains the guesses."""
    tree, choices = observation.draft.tree, observation.top_k
    below = {key: node for node, key in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, chosen = -1, list(choices[0][:1])
    for guess in guesses:
        node = below.get((node, guess), -1)
        if node < 0 or not choices[node + 1]:
            break
        chosen.append(choices[node + 1][0])
    return chosen
