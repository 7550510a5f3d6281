"""What operators see: metrics, access log, traces, recordings."""
