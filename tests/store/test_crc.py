"""The checksum is the same whichever package computes it."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hscache.store import crc

PACKAGES = [None] if crc.checksums is None else [None, crc.checksums]


@pytest.mark.parametrize("package", PACKAGES)
@given(data=st.binary(max_size=5000), cut=st.integers(0, 5000))
def test_the_checksum_of_pieces_is_that_of_the_whole(package: object, data: bytes, cut: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crc, "checksums", package)
        array, wanted = np.frombuffer(data, np.uint8), google_crc32c.value(data)
        assert crc.crc32c(array) == crc.crc32c(data) == wanted
        assert crc.crc32c(array[cut:], crc.crc32c(array[:cut])) == wanted
