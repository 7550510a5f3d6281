"""Options for running one model on several processes, shared by all commands and classes that start them."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options.declare import Options, option
from parlay.types import FieldError, UsageError

SPLITS = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""The options that ask for several processes."""
MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(Options):
    """How many processes, called ranks, run one model together. Raises UsageError for a value that is not allowed.

    ``tensor_parallel`` ranks share each layer; ``pipeline_parallel`` groups of them have some of the layers each. Or
    ``context_parallel`` groups of them have all layers, and each caches a part of each long text. Rank 0 is this
    process. It starts the others, or with ``rank_listen`` waits for ``parlay rank --join`` on other machines; then all
    prove to each other that they know one secret: PARLAY_RANK_SECRET in the environment, or ``rank_secret_file``. If a
    rank is silent for ``rank_timeout`` seconds, all ranks end.
    """

    tensor_parallel: int = option(
        1, "processes that split each layer of the model", low=1, high=MOST_RANKS, metavar="N"
    )
    pipeline_parallel: int = option(
        1, "stages of processes, each with some of the model's layers", low=1, high=MOST_RANKS, metavar="N"
    )
    context_parallel: int = option(
        1, "groups of processes, each with a part of each text's KV cache", low=1, high=MOST_RANKS, metavar="N"
    )
    rank_listen: str | None = option(
        None,
        "address to wait at for parlay rank --join on other machines (default: start all processes here)",
        metavar="HOST:PORT",
    )
    rank_secret_file: str | None = option(
        None,
        "file with the secret that all ranks share (default: PARLAY_RANK_SECRET in the environment)",
        metavar="FILE",
        opens=True,
    )
    rank_timeout: float = option(
        60.0, "most seconds that ranks wait for each other before all end", low=1, high=3600, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        super(RankOptions, self).__post_init__()
        if self.context_parallel > 1 and self.pipeline_parallel > 1:
            raise FieldError(
                "pipeline_parallel",
                "can't be used with context_parallel, whose processes have all layers each: remove one of them",
                "context_parallel",
            )
        if self.ranks > MOST_RANKS:
            raise UsageError(f"{self.asked} is too many processes: use at most {MOST_RANKS}", *SPLITS)

    @property
    def ranks(self) -> int:
        """Number of processes that run the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def asked(self) -> str:
        """The options that ask for several processes, as text."""
        sizes = {
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "context_parallel": self.context_parallel,
        }
        return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
