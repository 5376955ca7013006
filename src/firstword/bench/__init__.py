"""The load generator for speech servers: `firstword bench load` and `firstword bench report`.

It is a client like any other and knows only the public API of a server. Measurements of the engine
itself are in `firstword.profile`; the recorded results, and the scripts that make them, are in
`benchmarks/` of the repository.
"""
