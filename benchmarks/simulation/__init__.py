"""How far `parlay simulate` is from the engine."""
