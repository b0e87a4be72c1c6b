"""Determine, force and record which kernels run."""
