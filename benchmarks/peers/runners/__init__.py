"""One module per engine, run inside that engine's environment: of Parlay they need what imports no library."""
