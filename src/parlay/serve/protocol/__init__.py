"""The parts that the protocols share: fields, running a job, streaming, usage, log-probabilities."""

DONE_EVENT = "data: [DONE]"
"""The last event of OpenAI's streams without names of events."""
