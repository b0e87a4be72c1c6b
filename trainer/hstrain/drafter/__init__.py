"""The DFlash drafter and its losses."""
