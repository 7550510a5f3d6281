"""Certificates: which lossy strategies a user's calibration allows, and how often answers are audited."""
