"""Benchmarks of the server: many concurrent requests, some of which misbehave."""
