"""Drafters that count which token followed which."""
