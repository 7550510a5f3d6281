"""`parlay gateway`: one address for several replicas of a server. It retries requests and resumes broken streams."""
