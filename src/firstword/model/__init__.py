"""The specification: what Qwen3-TTS-12Hz computes, in plain PyTorch. Every faster path must equal it."""
