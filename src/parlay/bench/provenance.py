"""Makes the provenance record, the first record of every file of results: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import parlay
from parlay.options import LoadOptions
from parlay.system import threads
from parlay.system.machine import cpu_model

ROOT = Path(__file__).parents[3]
"""The repository that the package runs from, unless it is installed."""
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PARLAY_COMPILED")
MAY_DIFFER = ("command", "date", "busy_cores")
"""The fields in which two runs in one file may differ."""


def provenance(command: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the record, without names of people, hosts or folders.

    Runs in one file must have the same record, except for `MAY_DIFFER`. ``more`` adds fields.
    """
    versions = {"python": platform.python_version(), "parlay": parlay.__version__}
    return {
        "machine": machine(),
        "threads": threads.count(),
        "environment": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "versions": versions | {name: metadata.version(name) for name in PACKAGES},
        "commit": commit(),
        **(more or {}),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    }


def loading(load: LoadOptions, draft_model: str | None = None) -> dict[str, Any]:
    """Return the loading options that are not the defaults, with file names instead of paths.

    The number of threads is left out, because every record has it.
    """
    usual = {**asdict(LoadOptions()), "threads": load.threads, "draft_model": None}
    given = {**asdict(load), "draft_model": draft_model}
    return {name: _without_folders(value) for name, value in given.items() if value != usual[name]}


def _without_folders(value: Any) -> Any:
    return Path(value).resolve().name if isinstance(value, str) and Path(value).exists() else value


def machine() -> dict[str, Any]:
    """Describe the machine: processor, the instruction set that torch uses, memory, kernel, and accelerator if any."""
    found: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def commit() -> str:
    """Return the commit of the repository, marked if its sources were changed, or ``unknown`` outside the repository.

    An installed package may lie inside another repository, whose commit would be wrong, so parents are not searched.
    """
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git(
            "status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks", ":!benchmarks/results"
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(
        ("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout.strip()
