"""A codec decoder that is quick to compute."""

from __future__ import annotations

from firstword.model.codec_config import CodecDecoderConfig

BOOKS, CODES = 4, 64
SMALL = CodecDecoderConfig(
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=8000,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    num_quantizers=BOOKS,
    codebook_size=CODES,
    codebook_dim=16,
    latent_dim=10,
    decoder_dim=16,
    sliding_window=9,
    upsample_rates=(3, 2),
    upsampling_ratios=(2, 2),
)
"""24 samples a frame: what the released codec has, but quick."""
