"""Fitting: steps, ranks, optimizers, estimates."""
