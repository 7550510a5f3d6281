"""Predictions for a model on a machine, as data: what `parlay plan` prints. Uses `cost`, models and the engine."""
