"""The bodies of requests: strict types, which refuse unknown and unusable values."""
