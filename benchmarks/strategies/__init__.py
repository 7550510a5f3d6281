"""Every strategy of the catalogue on real text: tokens per step, speed, and what the formula says of it."""
