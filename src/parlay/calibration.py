"""Public module of calibration, which certifies lossy strategies."""

from parlay.bench.certify import Calibration, Shown, calibrate, calibrate_cascade, fewest

__all__ = [
    "Calibration",
    "Shown",
    "calibrate",
    "calibrate_cascade",
    "fewest",
]
