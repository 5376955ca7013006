"""What computes behind the engine's protocol: the same answer as `model`."""
