"""Read a store into packs of blocks."""
