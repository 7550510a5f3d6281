"""Findings of a quality bench: the lossy strategies that solved nearly as many of a task's problems as the best one.

The findings certify nothing. They name candidates; calibration then tests these on prompts that had no part in the
choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parlay.certificates.certificate import Binding, read_part, read_parts, write
from parlay.options import Options, option
from parlay.strategies.spelling import parse
from parlay.types import ParlayError

__all__ = ["Kept", "Quality", "read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Options):
    """A lossy strategy that kept 99 percent of the best accuracy measured on a task.

    It solved ``right`` of ``problems`` problems, and committed ``tokens_per_forward`` tokens per forward.
    """

    task: str = option()
    strategy: str = option()
    tokens_per_forward: float = option(low=0)
    right: int = option(low=0)
    problems: int = option(low=1)


@dataclass(frozen=True, slots=True)
class Quality:
    """All strategies that kept their quality, and the model that was measured."""

    binding: Binding
    kept: tuple[Kept, ...]

    def candidates(self) -> list[str]:
        """Return the strategies that are worth a calibration, safest first.

        Of the strategies that kept their quality on every task, the one with the most tokens per forward is returned
        for each ``selector``, the way of choosing which tokens to commit. Fewer tokens per forward count as safer.
        """
        tasks = {one.task for one in self.kept}
        speeds: dict[str, list[float]] = {}
        for one in self.kept:
            speeds.setdefault(one.strategy, []).append(one.tokens_per_forward)
        means = {name: sum(own) / len(own) for name, own in speeds.items() if len(own) == len(tasks)}
        fastest: dict[object, str] = {}
        for name in sorted(means, key=means.__getitem__):
            fastest[parse(name).settings.get("selector", name)] = name
        return sorted(fastest.values(), key=means.__getitem__)

    def check(self, binding: Binding, path: Path) -> None:
        """Raise ParlayError if the findings are about other weights or another data type."""
        if self.binding.weights != binding.weights or self.binding.dtype != binding.dtype:
            theirs, ours = (f"{each.model} in {each.dtype} ({each.weights[:12]})" for each in (self.binding, binding))
            raise ParlayError(
                f"{path} measured {theirs}, and this is {ours}: run parlay bench --quality for this model"
            )


def read(path: Path) -> Quality:
    """Read the findings in a file.

    Raises ParlayError, in one line, for a file that `parlay bench --quality` did not write.
    """
    data = read_parts(path, ("binding", "kept"))
    if not isinstance(data["kept"], list):
        raise ParlayError(f"{path} is damaged: kept is not a list; run parlay bench --quality again")
    return Quality(
        read_part(Binding, data["binding"], path), tuple(read_part(Kept, each, path) for each in data["kept"])
    )
