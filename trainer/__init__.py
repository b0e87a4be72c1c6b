"""hstrain: fit a DFlash drafter from an hscache store, without the target."""
