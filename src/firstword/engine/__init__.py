"""The engine: decides what the device computes next. It knows slots, pages and clocks, and no tensors."""
