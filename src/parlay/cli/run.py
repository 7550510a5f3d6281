"""`parlay run MODEL`: `parlay chat MODEL`, by the name that Ollama has for it."""

from parlay.cli.chat import add_arguments, run

__all__ = ["add_arguments", "run"]
