"""Drafters in another process or on another host, asked over HTTP."""
