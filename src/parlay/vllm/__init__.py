"""Parlay's drafters and budget policies inside vLLM: `Proposer` is a custom proposer for its ``speculative_config``."""

from parlay.vllm.proposer import Proposer

__all__ = ["Proposer"]
