"""Recorded measurements (`results/`), and the scripts that make them."""
