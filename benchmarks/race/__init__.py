"""The picture at the top of the README: one answer, plain and by the default strategy, as it was timed."""
