"""Scores a tool call for lm-eval."""

import json
from collections.abc import Mapping, Sequence


def parses(document: Mapping[str, str], answers: Sequence[str]) -> dict[str, float]:
    """Return the score: 1 if the text is a call, which is a JSON object with a name and arguments."""
    try:
        call = json.loads(answers[0])
    except ValueError:
        return {"parses": 0.0}
    return {"parses": float(isinstance(call, dict) and call.keys() == {"name", "arguments"})}
