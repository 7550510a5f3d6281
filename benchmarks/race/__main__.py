"""Times one answer of SmolLM2, plain and with the default strategy, and draws the README's picture of it.

python -m benchmarks.race           # time it here, then draw
python -m benchmarks.race --draw    # draw the last recording again
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser
from benchmarks.race.picture import picture
from benchmarks.race.record import read, record, write
from benchmarks.setup import SMOLLM2
from parlay.bench.provenance import provenance
from parlay.llm import LLM

RESULT = Path("benchmarks/results/race.json")
PICTURE = Path("docs/pictures/race.svg")


@one_line_errors("race")
def main() -> int:
    parser = command_parser("race", __doc__)
    parser.add_argument("--draw", action="store_true", help="draw the last recording, measure nothing")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    options = parser.parse_args()
    if not options.draw:
        with LLM(SMOLLM2, router_memory="off") as llm:
            write(RESULT, record(llm, options.rounds), provenance("python -m benchmarks.race"))
    PICTURE.write_text(picture(*read(RESULT)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
