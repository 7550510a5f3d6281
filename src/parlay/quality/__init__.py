"""What requests allow to be lost, and the proof that a lossy strategy keeps to it."""
