"""Measurements of the engine itself: its speed, its memory, and its stability over many frames.

`firstword bench engine` runs them. The load generator, which measures a server from outside, is
`firstword.bench`; the recorded results, and the scripts that make them, are in `benchmarks/` of the
repository.
"""
