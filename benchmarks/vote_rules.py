"""Replays recorded chains under rules that stop votes early, and measures their cost and answers.

`benchmarks.reasoning` records the chains. No model is needed: chains decode in step, one token each, so the rule, the
lengths and the answers determine the result. Cost is counted in tokens,
because on one core a token takes about as long among 12 chains as among 40.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.commands import RESULTS, one_line_errors, write_page
from benchmarks.options import command_parser
from parlay import VoteParams
from parlay.llm.voting import Ballot

CHAINS = RESULTS / "reasoning-chains.jsonl"


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains of a problem, in order: each one's answer, None if it has none, and its number of tokens."""

    place: int
    right: str
    answers: tuple[str | None, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a vote: the answer, the tokens of all chains together, and the number of forwards."""

    answer: str | None
    tokens: int
    forwards: int


def append(path: Path, chains: Chains) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(chains), ensure_ascii=False) + "\n")


def read(path: Path) -> list[Chains]:
    """Read all problems of a file; if a problem was recorded twice, the last record counts.

    Raises ValueError if the file is missing, or holds no problems with the same number of chains.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = [Chains(each["place"], each["right"], (*each["answers"],), (*each["tokens"],)) for each in lines]
    except OSError as error:
        raise ValueError(f"can't read the chains {path}: {error}; benchmarks.reasoning records them") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} holds no chains: name a file that benchmarks.reasoning wrote") from None
    if len({len(part) for each in found for part in (each.answers, each.tokens)}) > 1:
        raise ValueError(f"{path} holds problems with other numbers of chains: name a file of one run")
    return list({each.place: each for each in found}.values())


def replay(chains: Chains, params: VoteParams) -> Replayed:
    """Vote as the engine does: due chains begin, every chain writes a token, and chains at their end are counted."""
    ballot, tokens, forwards = Ballot(params), 0, 0
    left = {chain: chains.tokens[chain] for chain in ballot.due()}
    while left and not ballot.over:
        tokens, forwards = tokens + len(left), forwards + 1
        left = {chain: count - 1 for chain, count in left.items()}
        for chain in [chain for chain, count in left.items() if not count]:
            del left[chain]
            ballot.count(chain, chains.answers[chain] or "", "stop", 0.0)
        left |= {chain: chains.tokens[chain] for chain in ballot.due()}
    return Replayed(ballot.output().answer, tokens, forwards)


def page(every: Sequence[Chains], rules: Sequence[VoteParams]) -> str:
    """Write a table row for each rule, compared with the vote of all chains on the same problems."""
    full = [replay(each, VoteParams(n=len(each.tokens), early=False)) for each in every]
    lines = [
        f"{len(every)} problems. Tokens and forwards as shares of those of the full vote, which is right in "
        f"{100 * fmean(one.answer == each.right for one, each in zip(full, every, strict=True)):.1f} %.\n",
        "| confidence | chains at once | accuracy | other answers than the full vote | tokens | forwards |",
        "|---|---|---|---|---|---|",
    ]
    for rule in rules:
        found = [replay(each, rule) for each in every]
        right = fmean(one.answer == each.right for one, each in zip(found, every, strict=True))
        others = sum(one.answer != whole.answer for one, whole in zip(found, full, strict=True))
        tokens = sum(one.tokens for one in found) / sum(whole.tokens for whole in full)
        forwards = sum(one.forwards for one in found) / sum(whole.forwards for whole in full)
        once = "all" if rule.at_once is None else f"{rule.at_once}{', refilled' if rule.refill else ''}"
        sure = rule.confidence or "decided"
        lines.append(f"| {sure} | {once} | {100 * right:.1f} % | {others} | {tokens:.2f} | {forwards:.2f} |")
    return "\n".join(lines) + "\n"


def rules_of(options: argparse.Namespace, chains: int) -> list[VoteParams]:
    """Return every combination of rules. A confidence of 1 stops only when the outcome can't change."""
    return [
        VoteParams(n=chains, confidence=sure if sure < 1 else None, at_once=once, refill=once is not None and refill)
        for sure, once, refill in itertools.product(options.confidence, [None, *options.at_once], (True, False))
        if once is not None or refill
    ]


def main() -> None:
    parser = command_parser("vote_rules", __doc__)
    parser.add_argument("--chains", type=Path, default=CHAINS, metavar="FILE", help=f"(default: {CHAINS.name})")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out the first N problems (default: 0)")
    parser.add_argument("--problems", type=int, metavar="N", help="use N problems after those (default: all)")
    parser.add_argument("--confidence", type=float, nargs="+", default=[1, 0.95, 0.9, 0.8, 0.7, 0.6], metavar="X")
    parser.add_argument("--at-once", type=int, nargs="+", default=[4, 8, 12, 20], metavar="N")
    options = parser.parse_args()
    with one_line_errors("vote_rules"):
        every = read(options.chains)[options.first :][: options.problems]
        if not every:
            raise ValueError(f"--first {options.first}: the file has no problem after those")
        write_page(RESULTS / "reasoning-rules.jsonl", page(every, rules_of(options, len(every[0].tokens))))


if __name__ == "__main__":
    main()
