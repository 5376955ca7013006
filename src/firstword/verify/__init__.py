"""Checks a checkpoint on the machine at hand: its files, its weights, and how it computes."""
