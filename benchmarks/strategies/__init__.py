"""Measures every strategy of the catalogue on real text: tokens per step, speed, and the speed that the formula
predicts."""
