"""`parlay gateway`: one address for several replicas of a server, which retries requests and resumes broken streams."""
