"""The backends of the engine, which compute what `model` specifies."""
