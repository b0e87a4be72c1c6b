"""The on-disk format: only this package writes and reads it. No module here imports torch at module level."""
