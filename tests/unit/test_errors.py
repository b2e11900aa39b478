"""The errors: which builtin errors they are, what they print, and that they survive a pickle."""

from __future__ import annotations

import builtins
import copy
import errno
import inspect
import os
import pickle
import traceback

import pytest

from stockade import errors
from stockade.errors import StockadeError
from stockade.workspace.files.file_errors import refusal

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, StockadeError)]


def make(kind: type[StockadeError]) -> StockadeError:
    """Make an error with something in every field that its kind has."""
    values = {"hint": "do this", "errno": 5, "stage": "mounts", "missing": {"native": {"files": "no"}}}
    values |= {"paths": ("a", "b"), "failure": "swapped", "result": None}
    wanted = [name for name in inspect.signature(kind).parameters if name in values]
    error = kind("what happened", **{name: values[name] for name in wanted})
    if isinstance(error, OSError):
        error.errno, error.strerror, error.filename = errno.EIO, "Input/output error", "/inside/file"
    return error


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.NotFoundError, FileNotFoundError),
        (errors.DeniedError, PermissionError),
        (errors.FileExistsError, builtins.FileExistsError),
        (errors.IsADirectoryError, builtins.IsADirectoryError),
        (errors.NotADirectoryError, builtins.NotADirectoryError),
        (errors.FileError, OSError),
        (errors.DiskFullError, OSError),
        (errors.TimeoutError, builtins.TimeoutError),
    ],
)
def test_what_python_has_an_error_for_is_that_error_too(
    kind: type[StockadeError], builtin: type[Exception]
) -> None:
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_prints_its_message_alone(kind: type[StockadeError]) -> None:
    error = make(kind)
    assert str(error) == error.message == "what happened"
    assert repr(error) == f"{kind.__name__}('what happened')"


@pytest.mark.parametrize("kind", KINDS)
def test_a_traceback_shows_the_hint_below_the_message(kind: type[StockadeError]) -> None:
    lines = "".join(traceback.format_exception(make(kind))).splitlines()
    assert lines[-2].endswith(": what happened") and lines[-1] == "hint: do this"


def test_a_hint_that_changes_leaves_other_notes_alone() -> None:
    error = StockadeError("what happened", hint="do this")
    error.add_note("while loading")
    error.hint = "do that"
    assert error.__notes__ == ["while loading", "hint: do that"]
    error.hint = ""
    assert error.__notes__ == ["while loading"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", ["pickle", "copy"])
def test_every_error_survives_a_pickle_and_a_copy(kind: type[StockadeError], through: str) -> None:
    error = make(kind)
    again = pickle.loads(pickle.dumps(error)) if through == "pickle" else copy.copy(error)
    assert type(again) is kind
    assert (again.args, vars(again)) == (error.args, vars(error))
    if isinstance(error, OSError):
        assert isinstance(again, OSError)
        assert (again.errno, again.strerror, again.filename) == (
            errno.EIO,
            "Input/output error",
            "/inside/file",
        )


def test_a_missing_thing_that_is_no_file_has_an_errno_as_well() -> None:
    assert errors.NotFoundError("there is no receipt 5").errno == errno.ENOENT


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_every_refusal_of_the_kernel_is_an_oserror_with_its_errno_and_path(code: int) -> None:
    refused = refusal(OSError(code, os.strerror(code)), "/inside/file")
    assert isinstance(refused, OSError)
    assert (refused.errno, refused.strerror) == (code, os.strerror(code))
    assert refused.filename == "/inside/file"
    assert refused.message.startswith("/inside/file: ")
    # Python chooses a kind by the number: a handler for that kind catches ours.
    assert isinstance(refused, type(OSError(code, ""))) or type(OSError(code, "")) not in (
        FileNotFoundError,
        PermissionError,
        builtins.FileExistsError,
        builtins.IsADirectoryError,
        builtins.NotADirectoryError,
    )
