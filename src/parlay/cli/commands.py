"""The commands by purpose, each command's most useful options, and other programs' names of commands."""

from __future__ import annotations

GROUPS = {
    "use a model": {
        "chat": "chat with a model in the terminal",
        "run": "chat with MODEL in the terminal: the same as parlay chat MODEL",
        "generate": "continue a prompt, and print the text as it is decoded",
        "suggest": "write several continuations to pick from, in the time of one",
        "serve": "serve models over HTTP: OpenAI's, Anthropic's and Ollama's APIs",
        "demo": "race plain decoding against the default strategy",
    },
    "models on this machine": {
        "pull": "download a model",
        "models": "list the models on this machine",
        "rm": "remove a model that was pulled",
        "quantize": "write a model as a GGUF file in fewer bits",
        "prune": "write a smaller model without training it",
    },
    "measure and predict": {
        "bench": "measure how much faster your prompts get, and by what strategy",
        "plan": "predict how fast a model would be on a machine",
        "simulate": "predict what a server or a fleet would do under given traffic",
        "score": "measure a model's perplexity, and its answers to multiple choice",
        "calibrate": "certify lossy strategies that answer your prompts well enough",
    },
    "several servers and processes": {
        "gateway": "put one address in front of servers, and go on when one is lost",
        "rank": "run one rank: one of several processes that run a model together",
    },
    "strategies and what they draft from": {
        "strategies": "list the decoding strategies and their parameters",
        "router": "show or reset what auto, the default strategy, has learned here",
        "drafters": "list, add, share and compare trained drafters",
        "export": "write a trained drafter in the layout of another program",
        "train": "train a language model or a draft head",
        "datastore": "make and inspect datastores: texts from which a strategy drafts",
        "ngram": "build n-gram language models, score texts and write by them",
    },
    "shell": {"completion": "print a script that completes commands and flags in a shell"},
}
"""The commands by group, each with its summary. The module of the same name in this package implements a command: see
`Command`."""

COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}

_TALK = "--model --strategy --draft-model --system --max-tokens --temperature --seed --max-model-len --threads"
_EVERYDAY = {
    "run": _TALK,
    "chat": _TALK,
    "generate": "--model --strategy --draft-model --chat --system --file --document --max-tokens --temperature --seed "
    "--stop --json-schema --exactness --explain --json --threads",
    "suggest": "--file --model --max-tokens --json --threads",
    "serve": "--model --strategy --draft-model --host --port --api-key-file --max-model-len --max-num-seqs "
    "--max-loaded --allow-pull --replicas --tensor-parallel --certificate --threads --log-level",
    "demo": "--model --threads",
    "bench": "--model --draft-model --minutes --workloads --strategies --max-tokens --temperature --threads --out",
    "plan": "--model --draft-model --device --calibrate --context --batch --acceptance --strategy --devices --json",
    "simulate": "--model --device --trace --mixture --rate --duration --replicas --routing --autoscale --strategy "
    "--bench-rows --price --json",
    "score": "--model --window --json --threads",
    "calibrate": "-o --model --strategy --floor --agreement --confidence --max-tokens --temperature --threads",
}
EVERYDAY = {name: frozenset(flags.split()) for name, flags in _EVERYDAY.items()}
"""The flags that ``-h`` shows, by command; ``--help`` shows all. Commands that are missing here have few flags."""

_LIST = "parlay models lists the models on this machine"
_TO_SERVE = "parlay serve MODEL serves until it is stopped by Ctrl-C"
ELSEWHERE = {
    "list": _LIST,
    "ls": _LIST,
    "ps": f"{_LIST}; GET /api/ps of a server names those in memory",
    "show": f"{_LIST}, with their sizes",
    "stop": _TO_SERVE,
    "start": _TO_SERVE,
    "download": "parlay pull MODEL downloads a model",
    "remove": "parlay rm MODEL removes a model that was pulled",
    "complete": "parlay generate PROMPT continues a prompt",
    "eval": "parlay score measures a model",
    "benchmark": "parlay bench measures your prompts",
    "quantise": "parlay quantize writes a model in fewer bits",
    "create": "a model is a folder, a GGUF file or a Hub id; system prompts and parameters are flags of parlay run",
    "help": "write parlay -h, or parlay COMMAND -h",
    "version": "parlay --version",
}
"""Other programs' commands, such as Ollama's and vLLM's, and what to use here instead."""
