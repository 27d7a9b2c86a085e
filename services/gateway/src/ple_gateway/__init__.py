"""The OpenAI API in front of a Triplex inference service."""

__version__ = "0.1.0"
