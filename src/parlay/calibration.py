"""Public path of calibration: how lossy strategies get their certificate."""

from parlay.bench.certify import Calibration, Shown, calibrate, calibrate_cascade, fewest

__all__ = [
    "Calibration",
    "Shown",
    "calibrate",
    "calibrate_cascade",
    "fewest",
]
