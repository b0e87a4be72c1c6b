"""What a drafter is worth, from the cache alone."""
