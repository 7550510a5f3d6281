"""Observation by operators: metrics, access log, traces, recordings."""
