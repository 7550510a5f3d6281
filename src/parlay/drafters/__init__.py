"""Drafters: each proposes tokens in its own way. `parlay.strategies.catalogue` lists them."""
