"""How strategies scale with what they may spend per step."""
