"""Lookahead decoding (Fu et al. 2024): n-grams from a window of Jacobi iterations, verified when their token comes."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.fixed_point.ngram_pool import CAPACITY, GRAM_BYTES, NgramPool
from parlay.drafters.options import LOOKAHEAD as SOURCE
from parlay.drafters.options import LookaheadOptions
from parlay.drafters.per_sequence import History, OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.drafters.step_budget import StepBudget
from parlay.sampling import noise
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView, Tree, trees

_PURPOSE = 0x6C6F6F6B  # the stream of the window's first tokens: "look" in ASCII
_FIRST = (0.7, 0.17, 0.06)  # measured probabilities of the root's children: latest n-gram, second latest, others
_DEEPER = (0.92, 0.25, 0.25)  # the same for children of other nodes, by rank


class Lookahead(OneByOne):
    """Lookahead decoding (LADE; Fu et al. 2024, arXiv:2402.02057), not the trie of that name (arXiv:2312.12728).

    Two branches share each forward. The *lookahead branch* is a window of ``window`` columns and ``ngram`` - 1 rows:
    the last rows of a Jacobi trajectory, row 0 of which begins at the root. What the target says after the last row
    completes an n-gram in each column and becomes the next window's last row; row 0 leaves. Its nodes are probes, so
    nothing of it is ever accepted. The *verification branch* are up to ``guesses`` n-grams that begin with the root,
    the latest first, merged into one tree; the budget bounds these nodes, and the window comes on top.

    The pool keeps ``guesses`` n-grams per first token, of the window and, with ``copy``, of prompt and output. As in
    the reference the window moves on by one token per step, however many were committed, and begins with random
    tokens of the prompt; unlike there, it is filled by the request's own sampler, noise included, rather than by
    argmax, and guesses are verified from the first step on. ``window=0`` verifies n-grams of the text alone;
    ``guesses=0`` is plain decoding. Where a runner takes no trees, or rows run out, there is no window.

    The paper's settings (window, n-gram; as many guesses as columns) are 15, 5 for 7 B, 10, 5 for 13 B and 7, 5 for
    34 B on an A100. A CPU has less arithmetic to spare beside its memory bandwidth, so the defaults here are smaller.
    """

    def __init__(self, resources: Resources, options: LookaheadOptions) -> None:
        learns = options.window > 0 and options.guesses > 0
        self.needs = Needs(top_k=int(learns), outcomes=learns)
        self._columns = options.window
        self._ngram = options.ngram
        self._guesses = options.guesses
        self._copy = options.copy
        self._states: dict[int, _LookaheadState] = {}
        self._bytes = StateBytes(resources.room, self._states)
        self._step = StepBudget(resources.room, GRAM_BYTES)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._step.begin(budgets)
        return super().propose(views, budgets)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        if not self._guesses:
            return NO_DRAFT
        state = self._states.get(view.sequence)
        if state is None and not self._bytes.room.make(min(len(view.tokens), CAPACITY) * GRAM_BYTES):
            return NO_DRAFT
        if state is None or state.is_behind(view.tokens):
            state = self._states[view.sequence] = self._begin(view)
        state.follow(view.tokens, self._step)
        self._bytes.set(view.sequence, state.nbytes)
        guesses = state.pool.after(view.tokens[-1])
        merged = trees.first(trees.merge([trees.chain(tail, SOURCE) for tail in guesses]), budget)
        return _with_probes(merged, *(state.window.nodes(len(merged)) if state.window else ((), ())))

    def _begin(self, view: SequenceView) -> _LookaheadState:
        """Make the state. Row 0 begins wider than the window, because each added row costs it a column."""
        size = self._columns + self._ngram - 3 if self._columns else 0
        streams = [noise.stream(view.request.key, place, _PURPOSE) for place in range(size)]
        row = [view.tokens[stream % view.prompt_length] for stream in streams]
        window = GuessWindow(row, self._ngram) if self._columns else None
        return _LookaheadState(NgramPool(self._guesses), window, self._ngram if self._copy else 0)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Advance each window of which the target has computed all nodes."""
        for observation in observations:
            state = self._states.get(observation.view.sequence)
            before = len(observation.view.tokens) - len(observation.verdict.sampled)
            if state is not None and state.window and len(state.history.tokens) == before:
                draft = observation.draft
                own = [node for node in range(len(draft) - draft.probes, len(draft)) if draft.sources[node] == SOURCE]
                state.learn(own, observation.top_k)

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)
        self._bytes.release(sequence)


class GuessWindow:
    """The 2-D window: ``rows[l][i]`` is l + i tokens after the root. Row 0 lacks column 0, which is the root itself.

    It begins with row 0 alone, and advances by one token per step. Until there are ``ngram`` - 1 rows, each step adds a
    row and costs a column. From then on, each step completes an n-gram per column, and the oldest row leaves.
    """

    def __init__(self, row: list[int], ngram: int) -> None:
        self.rows = [row]
        self._ngram = ngram

    def nodes(self, first: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the window's nodes; the first of them becomes node ``first`` of the tree.

        Row 0 is a chain below the root. Column i of any other row is a child of column i of the row above.
        """
        tokens: list[int] = list(self.rows[0])
        above = [-1, *range(first, first + len(tokens))]
        parents = above[:-1]
        for row in self.rows[1:]:
            parents += above[: len(row)]
            above = list(range(first + len(tokens), first + len(tokens) + len(row)))
            tokens += row
        return tokens, parents

    def advance(self, root: int, new: list[int]) -> list[tuple[int, ...]]:
        """Advance one step. ``new``: the target's tokens after the last row. Returns the n-grams that are completed."""
        rows = [*self.rows, new]
        if len(rows) < self._ngram:
            self.rows = [row[1:] for row in rows]
            return []
        self.rows = [rows[1][1:], *rows[2:]]
        return list(zip([root, *rows[0]], *rows[1:], strict=True))


class _LookaheadState:
    """The state of one sequence: its text, the pool, and the window if there is one."""

    def __init__(self, pool: NgramPool, window: GuessWindow | None, copied: int) -> None:
        self.history = History()
        self.pool = pool
        self.window = window
        self._copied = copied  # length of n-grams that are copied from the text into the pool; 0: none

    def is_behind(self, tokens: Sequence[int]) -> bool:
        """Whether the sequence has lost tokens; the state must then be made anew."""
        return self.history.agree(tokens) < len(self.history.tokens)

    def follow(self, tokens: Sequence[int], step: StepBudget) -> None:
        """Take in new tokens: all, or if n-grams are copied from them, as many as the step allows."""
        history = self.history
        known = len(history.tokens)
        until = known + step.take(len(tokens) - known) if self._copied else len(tokens)
        history.tokens.extend(tokens[known:until])
        if self._copied:
            for end in range(max(known, self._copied - 1), until):
                first, *tail = tokens[end - self._copied + 1 : end + 1]
                self.pool.add(first, tuple(tail))

    @property
    def nbytes(self) -> int:
        return len(self.pool) * GRAM_BYTES

    def learn(self, probes: list[int], choices: Sequence[Sequence[int]]) -> None:
        """Advance the window, if the forward computed all its nodes (``probes``) and ``choices`` has their tokens."""
        assert self.window is not None
        seen = [-1, *probes]
        last = seen[-len(self.window.rows[-1]) - (len(self.window.rows) == 1) :]
        if len(probes) != sum(map(len, self.window.rows)) or not all(choices[node + 1] for node in last):
            return
        for first, *tail in self.window.advance(self.history.tokens[-1], [choices[node + 1][0] for node in last]):
            self.pool.add(first, tuple(tail))


def _with_probes(draft: Draft, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """The guesses with their scores, followed by the window's nodes as probes."""
    tree = Tree((*draft.tree.tokens, *tokens), (*draft.tree.parents, *parents))
    scores = (*_scores(draft.tree), *(0.0,) * len(tokens))
    return Draft(tree, sources=(SOURCE,) * len(tree), scores=scores, probes=len(tokens))


def _scores(tree: Tree) -> list[float]:
    """Scores by rank among siblings; siblings are in the order of their n-grams."""
    scores: list[float] = []
    ranks: dict[int, int] = {}
    for parent in tree.parents:
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        scores.append((_DEEPER if parent >= 0 else _FIRST)[min(rank, 2)])
    return scores
