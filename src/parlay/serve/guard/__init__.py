"""Protection of the server: API keys, limits of connections, bodies and requests, quotas."""
