"""Serves a Qwen4Exp model whose n-gram table lies in the PLE daemon."""

__version__ = "0.1.0"
