"""Simulates a server's KV cache: which requests and which drafts have room in its pages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from parlay.simulate.jobs import Job, Lane

HEADROOM, PAGE = 16, 16
"""As in the engine: tokens that must be free for each running sequence before another one starts; tokens of a page."""


def paged(tokens: int) -> int:
    """Return the tokens of as many whole pages as ``tokens`` take."""
    return -(-tokens // PAGE) * PAGE


class Memory:
    """The pages of a server with room for ``tokens`` tokens. Drafts have at most ``nodes`` nodes.

    ``lanes`` are the sequences that decode, and ``feeding`` those whose prompts are read; both may change. As in the
    engine, a sequence keeps the pages that it reserved for its drafts, and a draft for which there is no page is left
    out.
    """

    def __init__(self, tokens: int, nodes: int, lanes: Mapping[str, Lane], feeding: Collection[Job]) -> None:
        self._tokens, self._nodes, self._lanes, self._feeding = tokens, nodes, lanes, feeding

    def fits(self, present: int, more: float, steps: int = 0) -> bool:
        """Whether there is room for all sequences after ``steps`` further steps, and for ``more`` tokens.

        ``present`` is the number of tokens of all sequences now. Pages, which take longer to count, are counted only if
        tokens alone do not decide.
        """
        return self._is_ample(present + more, steps) or more <= self.free(steps)

    def free(self, steps: int) -> int:
        """Return the tokens of the pages that are free after ``steps`` further steps."""
        used = sum(paged(job.text) for job in self._feeding)
        for lane in self._lanes.values():
            used += sum(paged(lane.reserved(job, steps)) for _, _, job in lane.ends)
        return self._tokens // PAGE * PAGE - used

    def fits_drafts(self, present: int, read: Sequence[tuple[Lane, Job]], steps: int = 0) -> bool:
        """Whether there is room for all sequences and their drafts in the step after ``steps`` further steps.

        ``read`` are the requests whose prompts the step reads to the end, so that they draft, too.
        """
        if self._is_ample(present, steps):
            return True
        return sum(more for _, _, more in self._drafts(read, steps)) <= self.free(steps)

    def skip_drafts(self, read: Sequence[tuple[Lane, Job]]) -> list[Job]:
        """Let requests skip their drafts in the next step if there is no room for these. Returns the requests."""
        free, skipping = self.free(0), []
        for lane, job, more in list(self._drafts(read, 0)):
            if not more or more <= free:
                free -= more
            else:
                lane.skip(job)
                skipping.append(job)
        return skipping

    def _is_ample(self, tokens: float, steps: int) -> bool:
        """Whether there is surely room. In each step each sequence writes at most as many tokens as it has rows. Each
        may have a whole draft more, and its last page may be empty."""
        rows = sum(lane.rows for lane in self._lanes.values())
        sequences = sum(lane.count for lane in self._lanes.values()) + len(self._feeding)
        return tokens + steps * rows + (self._nodes + PAGE) * sequences <= self._tokens

    def _drafts(self, read: Sequence[tuple[Lane, Job]], steps: int) -> Iterator[tuple[Lane, Job, int]]:
        """Yield all requests that draft in the step after ``steps`` further steps, in the order in which the engine
        reserves memory, each with the tokens of the pages that its draft takes."""
        decoding = [(lane, job) for lane in self._lanes.values() for _, _, job in lane.ends]
        for lane, job in sorted(decoding, key=lambda each: each[1].rank):
            needed = lane.needed(job, lane.written(job, steps))
            yield lane, job, max(0, paged(needed) - paged(lane.reserved(job, steps)))
        for lane, job in read:
            yield lane, job, paged(lane.needed(job, job.written)) - paged(job.text)
