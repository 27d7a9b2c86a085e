"""The wire contract of the PLE daemon: generated messages, a typed client, one table of errors."""

__version__ = "0.1.0"
