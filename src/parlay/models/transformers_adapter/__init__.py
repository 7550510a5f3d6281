"""Any causal model of transformers as a runner."""
