"""Quantized weights of checkpoints: how they are packed, which tensor has which scheme, plain decoding."""
