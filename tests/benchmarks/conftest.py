"""The benchmarks are run from the repository's root and belong to no package that is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
