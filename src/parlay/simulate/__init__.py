"""Simulation of servers and fleets by events: traffic, routing, scaling and failures, with steps that cost what they do
on a machine. No model runs."""
