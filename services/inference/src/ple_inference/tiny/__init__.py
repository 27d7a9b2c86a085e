"""Makes `triplex-tiny`: a random Qwen4Exp checkpoint, small enough for a laptop's CPU."""
