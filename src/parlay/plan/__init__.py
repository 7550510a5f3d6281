"""Predictions for a model on a machine: `parlay plan` without its words. Stands on `cost` and on `llm`'s parts."""
