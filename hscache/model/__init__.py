"""The target: what its config says, loading, capture."""
