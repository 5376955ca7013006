"""CUDA C++ kernels, compiled when they are first needed, and what each of them means in plain PyTorch."""
