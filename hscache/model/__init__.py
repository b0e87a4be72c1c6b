"""The target: facts from its config, loading, capture."""
