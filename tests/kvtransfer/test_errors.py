"""The tree of errors, and what a metric may use of it."""

from __future__ import annotations

import pytest

from kvtransfer import errors
from kvtransfer.errors import RefusedError, TransferError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TransferError)]


def make_error(kind: type[TransferError]) -> TransferError:
    return kind("field", "because") if kind is RefusedError else kind()


def test_each_kind_has_a_label_of_its_own() -> None:
    labels = [kind.label for kind in KINDS]
    assert len(labels) == len(set(labels)) == 7
    assert all(label.replace("_", "").isalpha() for label in labels)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_drawn_in_the_module_and_says_something(kind: type[TransferError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
    error = make_error(kind)
    assert str(error)
    assert error.reason == ("because" if kind is RefusedError else kind.label)


def test_an_error_that_outlives_its_thread_holds_no_frames() -> None:
    try:
        try:
            raise OSError("reset")
        except OSError as cause:
            raise TransferError("lost") from cause
    except TransferError as caught:
        error = caught
    error.forget_frames()
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
    assert str(error) == "lost"
