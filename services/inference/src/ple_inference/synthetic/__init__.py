"""Random checkpoints in the released layouts, quantized or not, of the released shapes or small ones."""
