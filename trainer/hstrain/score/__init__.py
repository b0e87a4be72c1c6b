"""Score a drafter from the store alone."""
