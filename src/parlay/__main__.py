"""`python -m parlay` is `parlay`."""

import sys

from parlay.cli import main

sys.exit(main())
