"""Drafters: each proposes tokens in its own way. `catalogue` is the one place that lists them."""
