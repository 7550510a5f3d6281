"""Strategies: a drafter (or none), an accept rule and a budget policy under one name.

Imports no torch, but for `cache` and what building a drafter imports.
"""
