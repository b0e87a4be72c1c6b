"""A run on disk: its folder and checkpoints."""
