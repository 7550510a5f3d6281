"""The name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_model() -> str:
    """The processor's own name and its family and model numbers, where Linux tells them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or "unknown"
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    numbers = ", ".join(f"{name} {fields[name]}" for name in ("cpu family", "model") if name in fields)
    return f"{fields.get('model name', 'unknown')} ({numbers})"
