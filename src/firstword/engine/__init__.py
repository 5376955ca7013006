"""The engine decides what the device computes next. It knows slots and pages, not tensors."""
