"""Build a store from a corpus and a manifest."""
