"""Errors: every class has the exit status that the command line promises, and says what and what next."""

from __future__ import annotations

import pytest

from hscache import errors
from hscache.errors import HscacheError

STATUS = {
    "ConfigError": 2,
    "InputError": 2,
    "FormatError": 2,
    "EnvironmentFault": 3,
    "ConflictError": 4,
    "IntegrityError": 1,
    "TrainingFault": 1,
}


def test_each_class_has_its_exit_status() -> None:
    assert {cls.__name__: cls.exit_code for cls in HscacheError.__subclasses__()} == STATUS
    assert HscacheError.exit_code == 70


@pytest.mark.parametrize("name", STATUS)
def test_an_error_carries_code_message_and_hint(name: str) -> None:
    error = getattr(errors, name)("not-a-store", "nothing here", hint="do this")
    assert (str(error), error.code, error.message, error.hint) == (
        "nothing here",
        "not-a-store",
        "nothing here",
        "do this",
    )
    assert getattr(errors, name)("not-a-store", "nothing here").hint is None


def test_a_code_that_is_not_declared_cannot_be_used() -> None:
    with pytest.raises(AssertionError):
        HscacheError("no-such-code", "x")
