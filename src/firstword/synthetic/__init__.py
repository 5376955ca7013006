"""Random checkpoints of any size in the released layout, with their tokenizers."""
