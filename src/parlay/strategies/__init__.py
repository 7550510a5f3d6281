"""Strategies: a drafter (or none), an accept rule and a budget policy under one name.

Only `cache` and what builds a drafter import torch.
"""
