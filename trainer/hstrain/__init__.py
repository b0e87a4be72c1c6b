"""Fit a DFlash drafter from an hscache store, without ever loading the target."""

import os

# Packs differ in their shapes, and oneDNN and its wrapper keep a thousand compiled bf16 products each by default: a run
# on a CPU grew by 5 MB a step. Both read the limit when torch is loaded, so it stands here. Fewer cost no time.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
