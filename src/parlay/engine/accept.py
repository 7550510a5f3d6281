"""Accept rules walk the drafts; for drafters that ask for it, the sampler ranks the tokens at each row."""

from __future__ import annotations

from parlay.engine.isolation import isolated, named
from parlay.engine.sequence_step import Turn, grouped
from parlay.sampling.sampler import ranked
from parlay.types import Exactness, Fault, trees


def accept(turns: list[Turn]) -> None:
    """Each rule decides all its turns at once. If it raises, only the requests that make it raise end.

    A lossy verdict that would take its text's running score below the floor is not committed: the text goes on
    under the rule that its strategy names for this, from this step on.
    """
    _decide(turns)
    if leaving := [turn for turn in turns if turn.sequence.strategy.escape is not None and _leaves(turn)]:
        _decide(leaving)


def _decide(turns: list[Turn]) -> None:
    for group in grouped(turns, lambda turn: (id(turn.sequence.rule), id(turn.out))):
        isolated(_judge, group, lambda turn, error: turn.fail(named(error), error))


def _leaves(turn: Turn) -> bool:
    """Whether the text escapes in this step; until then, its score is kept. A stop that cuts the verdict ends it."""
    sequence, escape, tokens = turn.sequence, turn.sequence.strategy.escape, turn.verdict.sampled
    if escape is None or turn.fault is not None or sequence.escaped_at is not None:
        return False
    logits_NV = turn.out.logits_RV[[turn.root, *(turn.root + 1 + node for node in turn.verdict.path)]]
    below_N = logits_NV[range(len(tokens)), list(tokens)] - logits_NV.max(dim=1).values
    confidence = sequence.confidence + float(below_N.double().exp().sum())
    if confidence >= escape.floor * (sequence.output_length + len(tokens)):
        sequence.confidence = confidence
        return False
    sequence.escape()
    return True


def _judge(turns: list[Turn]) -> None:
    """Turns with one rule and one forward's output."""
    rule, logits_RV = turns[0].sequence.rule, turns[0].out.logits_RV
    views, drafts = [turn.sequence for turn in turns], [turn.draft for turn in turns]
    verdicts = rule.accept(views, drafts, logits_RV, [turn.root for turn in turns])
    for turn, verdict in list(zip(turns, verdicts, strict=True)):
        if isinstance(verdict, Fault):
            turn.fault = verdict
        else:
            turn.verdict = verdict


def rank(turns: list[Turn]) -> None:
    """Note the tokens that the sampler prefers at the root, then at each node on the node's own path."""
    for turn in turns:
        needs, tree = turn.sequence.needs, turn.draft.tree
        count = max([needs[drafter].choices for drafter in turn.curious])
        if count == 1 and not tree.tokens and turn.sequence.rule.exactness is Exactness.BITS:
            turn.choices = (turn.verdict.sampled[:1],)  # the rule asked the sampler already
            continue
        paths = [[], *([tree.tokens[above] for above in trees.path_to(tree, node)] for node in range(len(tree)))]
        logits_RV = turn.out.logits_RV[turn.root : turn.root + len(paths)]
        turn.choices = tuple(ranked(logits_RV, [turn.sequence] * len(paths), paths, count))
