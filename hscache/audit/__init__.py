"""Check that a store is complete and correct."""
