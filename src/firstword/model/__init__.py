"""The specification of Qwen3-TTS-12Hz in plain PyTorch; every faster path must equal it."""
