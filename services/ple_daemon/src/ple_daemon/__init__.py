"""Owns the n-gram (PLE) table and answers lookups and prefetches."""

__version__ = "0.1.0"
