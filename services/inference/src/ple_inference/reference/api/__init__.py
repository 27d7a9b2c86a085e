"""The reference engine's OpenAI-compatible HTTP server."""
