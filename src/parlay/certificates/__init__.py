"""Certificates: which lossy strategies a user's calibration allows, and audits of these strategies' answers."""
