"""The loop that trains heads: by the clock or by updates, with checkpoints, held-out acceptance and early stop.

All that a run resumes from is one safetensors file, which is replaced in one move: a kill loses one interval.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parlay.options import Options, UsageError, option
from parlay.system.user_cache import saved_whole
from parlay.train.data.batches import TrainingBatch, endless, in_order
from parlay.train.data.features import Featured
from parlay.train.optimizers import AUTO, PRECISIONS, adam, learning_rate, mixed, muon
from parlay.train.processes import Alone, LossOf, Processes
from parlay.train.recipes.recipe import Recipe
from parlay.train.watching import Watch
from parlay.types import ParlayError

MOST_GRADIENT = 1.0
_GIVE_UP = 3
"""Measurements without a better acceptance after which training stops."""
_RARELY = 4
"""Training takes at least so many times as long as measuring: a pass through a whole target takes minutes on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions(Options):
    """How long, how fast and how often."""

    minutes: float = option(60.0, "how long to train, once the texts are written", low=0.001)
    updates: int = option(0, "so many updates of the weights, whatever time they take; 0: --minutes", low=0)
    batch_tokens: int = option(2048, "tokens of answers in a batch", low=8)
    longest: int = option(640, "of longer texts the last so many tokens are used", low=8)
    matrix_rate: float = option(0.01, "peak learning rate of matrices (Muon)", low=0)
    slow_rate: float = option(5e-4, "peak learning rate of output vocabularies and norms (AdamW)", low=0)
    interval: float = option(120.0, "seconds between checkpoints", low=0.01)
    precision: str = option(
        AUTO, "in what products are computed: auto is bfloat16 where that is quicker", choices=PRECISIONS
    )
    seed: int = option(0, "seed of the order of texts", low=0)

    def share(self, updates: int, seconds: float) -> float:
        """How much of a run is over after so many updates and seconds; 1 at its end."""
        return updates / self.updates if self.updates else seconds / (60 * self.minutes)

    def lasting(self) -> dict[str, str]:
        """Options that a run keeps when it goes on from its state: all that decide what is learned."""
        return {"seed": str(self.seed)}


@dataclass(frozen=True, slots=True)
class Progress:
    """One interval of a run. ``acceptance`` is the share of held-out drafts that are right up to each depth; ``data``
    are further facts by name."""

    step: int
    tokens: int
    seconds: float
    loss: float
    acceptance: tuple[float, ...]

    def __str__(self) -> str:
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"step {self.step}  {self.tokens:,} tokens  {rate:,.0f}/s  loss {self.loss:.3f}  {self.heldout}"

    @property
    def heldout(self) -> str:
        """The acceptance on the held-out answers, in per cent by depth."""
        shares = " ".join(f"{100 * share:.1f}" for share in self.acceptance)
        return f"held-out {shares} % of drafts right, by depth"


class Loop:
    """Trains the module of ``recipe``; the file ``state`` holds everything that a run needs to resume."""

    def __init__(self, recipe: Recipe, options: LoopOptions, state: Path, where: Processes | None = None) -> None:
        """``where``: the processes that train the module, this one among them; None: this one alone."""
        self._recipe, self._options, self._state, self._where = recipe, options, state, where or Alone()
        parts = ((muon, recipe.matrices, options.matrix_rate), (adam, recipe.slow, options.slow_rate))
        self._optimizers = [(make(list(weights), rate), rate) for make, weights, rate in parts if weights]
        self._step = self._tokens = 0
        self._seconds = self._due = 0.0  # of training: so far, and when acceptance is measured next
        self._loss = float("nan")

    def run(
        self,
        texts: Sequence[Featured],
        heldout: Sequence[Featured],
        watch: Watch,
    ) -> Progress:
        """Trains until the run is over or acceptance stops growing; the module then holds the last weights.

        Acceptance is measured after each interval, or less often where that takes long. Where the progress bar of
        ``watch`` is not shown, each measurement prints a line.

        Raises ParlayError when the loss becomes NaN; the last good checkpoint stays.
        """
        if not texts or not heldout:
            raise ParlayError("there are too few texts to train on: write some more")
        options, where = self._options, self._where
        self._resume()
        loss_of = where.loss_of(self._recipe)
        batches = endless(texts, options.batch_tokens, options.longest, options.seed + self._step)
        own = islice(batches, where.rank, None, where.count)
        progress = self._progress(heldout)
        best, since = progress.acceptance, 0
        watch.measured(progress.heldout)
        while self._share < 1 and since < _GIVE_UP:
            self._train(loss_of, own, watch)
            if where.rank == 0:
                self._save()
            if self._share < 1 and self._seconds < self._due:
                continue
            progress = self._progress(heldout)
            watch.measured(progress.heldout)
            if where.rank == 0 and not watch.shown:
                print(progress, flush=True)
            since = 0 if sum(progress.acceptance) > sum(best) else since + 1
            best = max(best, progress.acceptance, key=sum)
        return progress

    def _train(self, loss_of: LossOf, batches: Iterator[TrainingBatch], watch: Watch) -> None:
        """Train for one interval."""
        self._recipe.module.train()
        losses: list[float] = []
        until = self._seconds + self._options.interval
        while (self._seconds < until and self._share < 1) or not losses:
            began = time.monotonic()
            losses.append(self._update(loss_of, next(batches)))
            self._seconds += self._where.mean(time.monotonic() - began)
            watch.step(self._share, self._seconds, self._tokens, losses[-1])
        self._loss = sum(losses) / len(losses)

    def _update(self, loss_of: LossOf, batch: TrainingBatch) -> float:
        with mixed(self._options.precision):
            loss = loss_of(batch)
        value = self._where.mean(float(loss.detach()))
        self._check("the loss", value)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._recipe.module.parameters(), MOST_GRADIENT)
        self._check("the gradient", float(norm))
        factor = learning_rate(self._share)
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._step += 1
        self._tokens += round(self._where.mean(float(batch.known_BR.sum())) * self._where.count)
        return value

    def _check(self, what: str, value: float) -> None:
        """Raise before the update, so that no weight becomes infinite or NaN."""
        if not math.isfinite(value):
            raise ParlayError(
                f"{what} became {value} at step {self._step}: go on with a lower learning rate from the last "
                f"good weights, which {self._state} holds if there are any"
            )

    @property
    def _share(self) -> float:
        return self._options.share(self._step, self._seconds)

    def _progress(self, heldout: Sequence[Featured]) -> Progress:
        began = time.monotonic()
        shares = acceptance(self._recipe, heldout, self._options)
        self._due = self._seconds + _RARELY * self._where.mean(time.monotonic() - began)
        return Progress(self._step, self._tokens, self._seconds, self._loss, shares)

    def _save(self) -> None:
        numbers = torch.tensor([self._step, self._tokens, self._seconds, self._loss], dtype=torch.float64)
        with saved_whole(self._state) as part:
            found = {f"module.{name}": tensor.contiguous() for name, tensor in self._recipe.module.state_dict().items()}
            for number, (optimizer, _) in enumerate(self._optimizers):
                for index, state in optimizer.state_dict()["state"].items():
                    found |= {
                        f"optimizer.{number}.{index}.{name}": torch.as_tensor(each) for name, each in state.items()
                    }
            metadata = {"options": json.dumps(self._options.lasting())}
            save_file({**{name: tensor.clone() for name, tensor in found.items()}, "numbers": numbers}, part, metadata)

    def _resume(self) -> None:
        if not self._state.exists():
            return
        try:
            with safe_open(self._state, "pt") as file:
                self._check_options(json.loads((file.metadata() or {}).get("options", "{}")))
            saved = load_file(self._state)
            self._step, self._tokens = (int(number) for number in saved["numbers"][:2])
            self._seconds, self._loss = saved["numbers"][2:].tolist()
            _restore(saved, self._recipe.module, self._optimizers)
        except UsageError:
            raise
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ParlayError(
                f"{self._state} is no checkpoint of a run with these options, or is damaged ({reason}): "
                "delete it to begin anew, or name another folder by --work"
            ) from error

    def _check_options(self, then: Mapping[str, str]) -> None:
        """Raises UsageError where the state belongs to a run with other ``lasting`` options."""
        for name, value in self._options.lasting().items():
            if then.get(name, value) != value:
                raise UsageError(
                    f"{self._state} is of a run with {name}={then[name]}, and this one has {name}={value}: give that "
                    "again to go on, delete the file to begin anew, or name another folder by --work"
                )


def acceptance(recipe: Recipe, texts: Sequence[Featured], options: LoopOptions) -> tuple[float, ...]:
    """Share of drafts that are right up to each depth."""
    recipe.module.eval()
    with torch.inference_mode(), mixed(options.precision):
        batches = in_order(texts, options.batch_tokens, options.longest)
        counts = torch.stack([recipe.right(batch) for batch in batches]).sum(0).tolist()
    return tuple(count / max(counts[0], 1) for count in counts[1:])


Stepped = Sequence[tuple[torch.optim.Optimizer, float]]


def _restore(saved: Mapping[str, Tensor], module: nn.Module, optimizers: Stepped) -> None:
    module.load_state_dict({name.removeprefix("module."): t for name, t in saved.items() if name.startswith("module.")})
    for number, (optimizer, _) in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in saved.items():
            kind, *rest = name.split(".", 3)
            if kind == "optimizer" and rest[0] == str(number):
                state.setdefault(int(rest[1]), {})[rest[2]] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
