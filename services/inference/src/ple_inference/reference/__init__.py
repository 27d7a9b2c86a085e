"""The reference engine: Transformers' model on a CPU, its n-gram rows from the daemon."""
