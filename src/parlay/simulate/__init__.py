"""Simulation of servers and fleets, event by event: traffic, routing, scaling and failures. No model runs; a machine's
times give the seconds of each step."""
