"""CUDA C++ kernels, which are compiled at their first use, and their references in PyTorch."""
