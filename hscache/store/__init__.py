"""The on-disk format: written and read here, and nowhere else. No torch at module level."""
