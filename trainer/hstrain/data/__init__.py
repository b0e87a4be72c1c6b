"""From a store to packs of blocks."""
