"""From results to OpenAI's JSON, with what Parlay says beside it."""
