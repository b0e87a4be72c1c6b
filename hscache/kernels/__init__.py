"""Which kernels run, and proof of it."""
