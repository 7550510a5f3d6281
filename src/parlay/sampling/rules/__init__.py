"""Accept rules: turn a draft and the target's logits into committed tokens. One file per family.

Rules of third parties derive from `DistributionRule`; `descend` and `longest` walk a tree for them.
"""

from __future__ import annotations

from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.lossy import longest
from parlay.sampling.rules.rule_input import RuleInput, descend
from parlay.sampling.rules.shared_noise import SharedNoise

__all__ = ["DistributionRule", "RuleInput", "SharedNoise", "descend", "longest"]
