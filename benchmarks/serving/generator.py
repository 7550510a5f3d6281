"""Runs `vllm bench serve` once for each line of standard input, a JSON list of its arguments.

Another environment's Python executes this file; it has vLLM and nothing of Parlay. Importing vLLM takes longer than
most runs, so many runs share one process.
"""

import argparse
import json
import sys

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        main(parser.parse_args(json.loads(line)))
