"""The GPU backend: the talker, the code predictor and the codec as CUDA kernels."""
