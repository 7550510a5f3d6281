"""From logits to tokens: noise, processors, the sampler, accept rules. Pure functions."""
