"""Measures launch time, the engine's own time per step, and drafters that are wrong on purpose, on this machine."""
