"""Fixtures that several test modules share."""

from __future__ import annotations

import os

from hypothesis import settings

# wall time on a shared machine says nothing; the same examples in every run, so that a red test stays red
settings.register_profile("hscache", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "hscache"))
