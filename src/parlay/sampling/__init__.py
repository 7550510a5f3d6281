"""Turns logits into tokens: noise, processors, the sampler, accept rules. All are pure functions."""
