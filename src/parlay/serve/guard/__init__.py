"""Protection of the server: limits of connections, threads and keys."""
