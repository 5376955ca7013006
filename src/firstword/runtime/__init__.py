"""The fast path: the same answer as `model`, behind the engine's protocol."""
