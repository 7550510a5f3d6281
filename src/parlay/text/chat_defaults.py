"""How chats sample where the model's makers recommend nothing."""

from __future__ import annotations

from collections.abc import Mapping

SAMPLING: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}
