"""Draft models on their own threads, and drafters in other processes, which draft while the target verifies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from parlay.drafters.draft_models.best_first import BestChains
from parlay.drafters.draft_models.draft_sequences import DraftJob, DraftSequences
from parlay.drafters.draft_models.grown import GrownDrafts, is_plain, tree_request
from parlay.drafters.draft_models.opening import DraftWriter, draft_name, open_draft
from parlay.drafters.options import PARALLEL_DRAFT as SOURCE
from parlay.drafters.options import ParallelDraftOptions
from parlay.drafters.remote.remote import Remote, RemoteOptions
from parlay.drafters.resources import Resources
from parlay.models.beside import GrowthBeside, ThreadBeside
from parlay.models.forward import GrownTree, Growth
from parlay.models.native import NativeRunner
from parlay.options import UsageError, refuse_unread
from parlay.types import Draft, SequenceView, trees

_log = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens that continue a text, and the drafter's probability of each; empty if it gives none."""

    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


@dataclass(slots=True)
class Written:
    """Chains drafted during a target's forward, by sequence, or the error that prevented them.

    ``seconds``: time per token; 0 if unknown.
    """

    chains: dict[int, Chain] = field(default_factory=dict)
    error: Exception | None = None
    seconds: float = 0.0


class DraftResource(Protocol):
    """Cores, a device or a host that drafts. One thread calls it.

    After `begin`, `end` must be called before anything else. Sequences that can't be drafted for get no chain.
    """

    def seconds(self) -> float:
        """The time by its clock."""
        ...

    def beside(self, view: SequenceView) -> bool:
        """Whether it can draft for this request while the calling thread does something else."""
        ...

    def write(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> Written:
        """Continue each text by its entry of ``lengths``, while the caller waits. Raises the errors of drafting."""
        ...

    def begin(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> None:
        """Begin to continue each text by its entry of ``lengths``. The texts must not change until `end`."""
        ...

    def end(self, *, stop: bool) -> Written:
        """Wait for the chains that were begun; with ``stop``, only for the token being written.

        Errors are in the result.
        """
        ...

    def release(self, sequence: int) -> None:
        """Forget a sequence for which nothing is being drafted."""
        ...


class ModelBeside:
    """A draft model that the compiled decoder runs on its own threads.

    While nothing else runs, it drafts for requests whose logits are edited, and for all requests if another decoder
    runs the model.
    """

    def __init__(self, resources: Resources, options: ParallelDraftOptions, clock: Clock = time.perf_counter) -> None:
        refuse_unread(f"strategy {SOURCE}", options, ("deadline_ms",), "without url=: remove it")
        runner = open_draft(SOURCE, resources, draft_name(SOURCE, resources, options.model))
        try:
            self._thread = ThreadBeside(options.threads)
        except ValueError as error:
            raise UsageError(f"strategy {SOURCE}: {error}") from None
        self._clock = clock
        self._sequences = DraftSequences(runner)
        self._writer: DraftWriter = BestChains(runner, self._sequences, SOURCE, options.min_p)
        self._growth = Growth(0, 1, options.min_p, short=options.tokens)
        self._runner = runner if isinstance(runner, NativeRunner) and runner.grows else None
        if self._runner is not None:
            self._writer = GrownDrafts(self._runner, self._sequences, SOURCE, self._growth, self._writer)
        elif options.form != "auto":
            _log.warning("%s: %s drafts before each forward, not during it: %s", SOURCE, runner.spec.name, _NOT_HERE)
        self._growing: GrowthBeside | None = None
        self._written = Written()
        resources.closing.callback(self._close)

    def seconds(self) -> float:
        return self._clock()

    def beside(self, view: SequenceView) -> bool:
        return self._runner is not None and is_plain(view)

    def write(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> Written:
        jobs = list(self._sequences.jobs(views, lengths).values())
        began = self._clock()
        drafts = self._writer.write(jobs) if jobs else []
        return _written([job.view for job in jobs], drafts, self._clock() - began)

    def begin(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> None:
        assert self._runner is not None, "`beside` was asked"
        jobs = list(self._sequences.jobs(views, lengths).values())
        self._written = Written()
        if not jobs:
            return
        texts, requests = [job.sequence.segment() for job in jobs], [tree_request(job) for job in jobs]
        growth = self._growth._replace(
            levels=max([job.budget for job in jobs]), least=0.0
        )  # drafting costs the target no time
        self._growing = GrowthBeside(
            self._runner, texts, growth, requests, beside=self._thread, ended=lambda grown: self._keep(jobs, grown)
        )

    def _keep(self, jobs: Sequence[DraftJob], grown: list[GrownTree] | Exception) -> None:
        """Cache the chains that have grown in the draft model, as if they were committed."""
        if isinstance(grown, Exception):
            self._written.error = grown
            return
        for job, tree in zip(jobs, grown, strict=True):
            self._sequences.keep(job.sequence, tree.likeliest_rows, tree.rows)
            self._written.chains[job.view.sequence] = Chain(tree.tokens, tree.chances)

    def end(self, *, stop: bool) -> Written:
        if self._growing is not None:
            growing = self._growing
            growing.end(stop=stop)
            self._growing = None
            longest = max([len(chain.tokens) for chain in self._written.chains.values()], default=0)
            self._written.seconds = growing.seconds / longest if longest else 0.0
        return self._written

    def release(self, sequence: int) -> None:
        self._sequences.release(sequence)

    def _close(self) -> None:
        if self._growing is not None:
            self._growing.end(stop=True)
        self._thread.close()


_NOT_HERE = "only the compiled decoder drafts beside a target; another process can, with url="


class ServiceBeside:
    """A drafter behind ``parlay serve --drafter-only``, which drafts while the target verifies here."""

    def __init__(self, resources: Resources, options: ParallelDraftOptions, clock: Clock = time.perf_counter) -> None:
        if options.model:
            raise UsageError(f"strategy {SOURCE}: model= and url= both say who drafts; remove one of them")
        where = "with url=, whose service has its own options: remove it"
        refuse_unread(f"strategy {SOURCE}", options, ("min_p", "threads", "tokens"), where)
        self._remote = Remote(resources, RemoteOptions(url=options.url, deadline_ms=options.deadline_ms))
        self._clock = clock
        self._thread = ThreadBeside()
        self._views: Sequence[SequenceView] = ()
        self._asked: Future[tuple[list[Draft], float]] | None = None
        resources.closing.callback(self._thread.close)

    def seconds(self) -> float:
        return self._clock()

    def beside(self, view: SequenceView) -> bool:
        return True

    def write(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> Written:
        began = self._clock()
        return _written(views, self._remote.propose(views, lengths), self._clock() - began)

    def begin(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> None:
        self._views = views
        self._asked = self._thread.begin(lambda: self._ask(views, lengths))

    def _ask(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> tuple[list[Draft], float]:
        began = self._clock()
        return self._remote.propose(views, lengths), self._clock() - began

    def end(self, *, stop: bool) -> Written:
        """Wait for the service until its deadline, whatever ``stop`` says: only then can it answer again."""
        asked, self._asked = self._asked, None
        if asked is None:
            return Written()
        try:
            drafts, seconds = asked.result()
        except Exception as error:
            return Written(error=error)
        return _written(self._views, drafts, seconds)

    def release(self, sequence: int) -> None:
        self._remote.release(sequence)


def _written(views: Sequence[SequenceView], drafts: Sequence[Draft], seconds: float) -> Written:
    """The likeliest path of each draft. ``seconds``: time for all drafts together."""
    best = [trees.best_chain(draft) for draft in drafts]
    longest = max(map(len, best), default=0)
    chains = {view.sequence: Chain(each.tree.tokens, each.scores) for view, each in zip(views, best, strict=True)}
    return Written(chains, seconds=seconds / longest if longest else 0.0)
