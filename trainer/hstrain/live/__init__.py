"""Decoding with the target, and other engines as a reference."""
