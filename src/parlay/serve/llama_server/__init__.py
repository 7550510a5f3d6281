"""llama-server's own API, as editors speak it."""
