"""Proof that a store is whole and right."""
