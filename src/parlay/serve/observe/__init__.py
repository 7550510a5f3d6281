"""Observation for operators: metrics, access log, traces, recordings."""
