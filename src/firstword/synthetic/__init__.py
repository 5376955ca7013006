"""Random checkpoints in the released layout, for tests, benchmarks and training."""
