"""One module per engine, run inside that engine's environment: none imports Parlay but Parlay's own."""
