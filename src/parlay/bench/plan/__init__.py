"""Predicts speeds of a model on a machine, as data that `parlay plan` prints. Uses `cost`, models and the engine."""
