"""Text files that a command line names."""

from __future__ import annotations

from pathlib import Path


def read_text(name: str, kind: str) -> str:
    """The text of a UTF-8 file. Raises ValueError that says which ``kind`` of file it was, and what to do."""
    try:
        return Path(name).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"can't read the {kind} {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{kind} {name} is not UTF-8 (byte {error.start}): convert it first, say with iconv") from None
