"""Measures speed: the parts that `parlay bench`, the benchmarks and the demo share."""
