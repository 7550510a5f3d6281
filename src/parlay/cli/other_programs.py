"""Flags of llama.cpp and vLLM, with their names here, or why there is none."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from parlay.options import UsageError
from parlay.options.vllm import ARGUMENTS, FOUND, LOGGED


@dataclass(frozen=True, slots=True)
class Foreign:
    """A flag of another program; ``to`` is its name here.

    Without one the flag has no effect, and ``why`` gives the reason. If it is ``refused``, the command ends with
    ``why``, unless the flag's value is one of ``only``, which change nothing. ``values`` is the number of its
    arguments.
    """

    to: str = ""
    why: str = ""
    values: int = 1
    refused: bool = False
    only: tuple[str, ...] = ()


_GPU = "a model runs on one device as a whole: --device chooses it"
_SERVED = "write NAME=MODEL"
_DRAFTS = "write --strategy draft-model:k=N"
_TALKS = "parlay chat talks, parlay generate continues the prompt"
_MIROSTAT = ("--mirostat", "--mirostat-lr", "--mirostat-ent")
_XTC = ("--xtc-probability", "--xtc-threshold", "--dynatemp-range", "--dynatemp-exp", "--top-nsigma", "--top-n-sigma")
_DRY = ("--dry-multiplier", "--dry-base", "--dry-allowed-length", "--dry-penalty-last-n", "--dry-sequence-breaker")
_EMBEDS = "leave it out: /v1/embeddings and /v1/rerank of parlay serve need no flag"


def _same(to: str, *names: str) -> dict[str, Foreign]:
    return dict.fromkeys(names, Foreign(to))


def _idle(why: str, *names: str, values: int = 0) -> dict[str, Foreign]:
    return dict.fromkeys(names, Foreign(why=why, values=values))


def _none(why: str, *names: str, values: int = 1) -> dict[str, Foreign]:
    return dict.fromkeys(names, Foreign(why=why, values=values, refused=True))


LLAMA_CPP: Mapping[str, Foreign] = {
    **_same("--model", "-m", "-hf", "-hfr", "--hf-repo"),
    **_same("--draft-model", "-md", "--model-draft", "-hfd", "--hf-repo-draft"),
    **_same("--max-model-len", "-c", "--ctx-size"),
    **_same("--threads", "-t"),
    **_same("--max-num-seqs", "-np", "--parallel"),
    **_same("--max-tokens", "-n", "--predict", "--n-predict"),
    **_same("--temperature", "--temp"),
    **_same("--seed", "-s"),
    **_same("--repetition-penalty", "--repeat-penalty"),
    **_same("--typical-p", "--typical"),
    **_same("--json-schema", "-j", "-jf", "--json-schema-file"),
    **_same("--file", "-f"),
    **_same("--system", "-sys", "--system-prompt"),
    **_same("--stop", "-r", "--reverse-prompt"),
    **_same("--kv-cache-dtype", "-ctk", "--cache-type-k", "-ctv", "--cache-type-v"),
    **_same("PROMPT", "-p", "--prompt"),
    **_idle(_GPU, "-ngl", "--gpu-layers", "--n-gpu-layers", "-ngld", "-mg", "--main-gpu", "-ts", "-sm", values=1),
    **_idle("the fastest kernels are always used", "-fa", "--flash-attn", values=1),
    **_idle("weights are always mapped into memory", "--mlock", "--no-mmap"),
    **_idle("chat templates are always Jinja", "--jinja"),
    **_idle("a step takes up to 512 rows", "-b", "--batch-size", "-ub", "--ubatch-size", values=1),
    **_idle("all requests of a step are always decoded together", "-cb", "--cont-batching", "--no-webui", "--metrics"),
    **_idle("there is one number of threads: --threads", "-tb", "--threads-batch", values=1),
    **_idle("text is always printed as it is decoded", "--stream"),
    **_idle("a model is ready when it is loaded", "--no-warmup"),
    **_none("write --regex PATTERN or --json-schema FILE", "--grammar", "--grammar-file"),
    **_none("write --top-p P or --min-p P", *_MIROSTAT, *_XTC),
    **_none("write --repetition-penalty X", *_DRY),
    **_none("samplers run in one order: leave it out", "--samplers", "--sampling-seq", "--sampler-seq"),
    **_none("--repetition-penalty covers the whole text: leave it out", "--repeat-last-n"),
    **_none("write --prefix-cache FILE", "--prompt-cache", "--slot-save-path"),
    **_none(_TALKS, "-cnv", "--conversation", "-no-cnv", "--no-conversation", values=0),
    **_none(_DRAFTS, "--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-p-min"),
    **_none(_SERVED, "-a", "--alias"),
    **_none("name a tokenizer that has the template with --tokenizer", "--chat-template", "--chat-template-file"),
    **_none("merge the adapter at its own scale with --lora FOLDER", "--lora-scaled"),
    **_none("models read text alone", "--mmproj", "-mm"),
    **_none(_EMBEDS, "--embedding", "--embeddings", "--reranking", values=0),
}


def _of_vllm() -> dict[str, Foreign]:
    """The command-line flags of vLLM's `LLM` arguments; each switch has a ``--no-`` form."""
    flags: dict[str, Foreign] = {}
    for name, meaning in ARGUMENTS.items():
        flag, why = name.replace("_", "-"), meaning.why or "there is nothing like it here"
        refused = meaning.only is not None
        only = tuple(str(value) for value in meaning.only or () if isinstance(value, str | int) and value != "")
        flags[f"--{flag}"] = Foreign("", why, 0 if meaning.switch else 1, refused, () if meaning.switch else only)
        if meaning.switch:
            flags[f"--no-{flag}"] = Foreign("", why, 0)
    short = {"-q": "quantization", "-dp": "data-parallel-size"}
    return flags | {name: flags[f"--{full}"] for name, full in short.items()}


VLLM: Mapping[str, Foreign] = {
    **_of_vllm(),
    **_same("--tensor-parallel", "--tensor-parallel-size", "-tp"),
    **_same("--pipeline-parallel", "--pipeline-parallel-size", "-pp"),
    **_same("--context-parallel", "--context-parallel-size"),
    **_same("--log-level", "--uvicorn-log-level"),
    **_same("--cors-origin", "--allowed-origins"),
    **_same("--max-waiting", "--max-queue-len"),
    **_idle("tools are read as the model's template writes them", "--enable-auto-tool-choice"),
    **_idle(FOUND, "--tool-call-parser", values=1),
    **_idle(LOGGED, "--enable-log-requests"),
    **_none(_SERVED, "--served-model-name"),
    **_none("write --strategy NAME and --draft-model MODEL", "--speculative-config", "--speculative-model"),
    **_none("put a proxy that speaks TLS before the server", "--ssl-keyfile", "--ssl-certfile"),
    **_none("name a tokenizer that has the template with --tokenizer", "--chat-template"),
}


def translated(words: Sequence[str], own: Collection[str], command: str) -> list[str]:
    """Translate other programs' flags in the command line of ``command`` to its own.

    ``own`` are the command's flags, which take precedence. A line on standard error lists flags without effect. Raises
    UsageError for a flag that can't be honoured.
    """
    known = {**VLLM, **LLAMA_CPP}
    idle: dict[str, str] = {}
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        if word == "--":
            found += [word, *rest]
        elif name in own or name not in known:
            found.append(word)
        elif known[name].to or (known[name].refused and not known[name].only):
            found += [*_as_here(name, known[name], own, command), *values]
        elif known[name].only:
            _check_value(name, known[name], value if equals else next(rest, ""))
        else:
            idle[name] = known[name].why
            for _ in range(known[name].values - len(values)):
                next(rest, None)
    for name, why in idle.items():
        print(f"parlay: note: {name} has no effect: {why}", file=sys.stderr)
    return found


def _as_here(name: str, flag: Foreign, own: Collection[str], command: str) -> list[str]:
    """The flag's name here; empty if its value is the command's argument. Raises UsageError if the command has no such
    flag."""
    if flag.refused:
        raise UsageError(f"{command} has no {name}: {flag.why}")
    if flag.to == "PROMPT":
        return []
    if flag.to not in own:
        raise UsageError(f"{command} has no {name}, which is called {flag.to} in the commands that have it")
    return [flag.to]


def _check_value(name: str, flag: Foreign, value: str) -> None:
    """Raises UsageError for a value that can't be honoured."""
    if value not in flag.only:
        raise UsageError(f"{name} {value}: {flag.why} (possible here: {', '.join(flag.only)})")
