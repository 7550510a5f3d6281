"""Options of a training run that lasts about a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from parlay.train.lm import TrainOptions

Kind = TypeVar("Kind", bound=TrainOptions)


def tiny(kind: type[Kind], data: Path, folder: Path, **more: Any) -> Kind:
    """Return the options of a kind of run, changed by ``more``. The run writes into ``folder`` only."""
    return kind(
        data=data,
        out=folder / "out",
        work=folder / "work",
        shape="tiny",
        vocab_size=400,
        batch_tokens=256,
        context=128,
        threads=1,
        compile=False,
        **more,
    )
