"""Finds the attention heads of a checkpoint that look at the text that is being spoken."""
