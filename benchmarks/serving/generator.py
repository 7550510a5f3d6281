"""Runs `vllm bench serve` once for each line of standard input, a JSON list of its arguments.

The Python of another environment executes this file: one that has vLLM, and nothing of ours. Importing vLLM takes
longer than most runs, hence many runs in one process.
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
