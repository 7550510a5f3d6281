"""The bodies of requests: strict types that let nothing unknown or unusable past."""
