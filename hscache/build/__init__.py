"""From corpus and manifest to a store."""
