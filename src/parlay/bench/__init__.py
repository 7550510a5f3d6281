"""Measuring: what every benchmark and the demo share."""
