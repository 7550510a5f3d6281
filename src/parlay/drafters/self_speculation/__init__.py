"""Drafters that use a part of the target's own layers."""
