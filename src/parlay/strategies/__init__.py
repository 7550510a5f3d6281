"""Strategies: a drafter (or none), an accept rule and a budget policy under one name.

Only modules that build drafters or accept rules import torch.
"""
