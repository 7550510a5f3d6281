"""Turns results into the JSON of OpenAI's, Anthropic's and Ollama's APIs, with Parlay's own fields."""
