"""Quality under parallelism: generated tasks, their scores, and curves of accuracy against tokens per forward."""
