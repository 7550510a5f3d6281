"""The parts that the protocols share: fields, running a job, streaming, usage, log-probabilities."""
