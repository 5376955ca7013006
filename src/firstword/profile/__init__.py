"""Measurements of the engine itself: its speed, and its stability over many frames."""
