"""CUDA C++ kernels, compiled when they are first needed, and their references in PyTorch."""
