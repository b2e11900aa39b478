"""Errors as clients see them."""

from __future__ import annotations

import errno

import msgspec
import pytest
from litestar.exceptions import NotFoundException

from stockade.errors import NotFoundError, PolicyError, SetupError, UnsupportedError
from stockade.server.wire.errors import ApiError, ServerPaths, api_error, create_error, plain_words


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PolicyError("wrong"), 400),
        (UnsupportedError("not here"), 503),
        (NotFoundError("no such file"), 404),
        (SetupError("broken"), 500),
        (OSError(errno.EACCES, "x"), 403),
        (OSError(errno.ENOSPC, "x"), 507),
        (msgspec.ValidationError("Expected `int`"), 400),
        (ValueError("anything"), 500),
        (ApiError(418, "TEAPOT", "short and stout"), 418),
    ],
)
def test_each_kind_has_its_status(error: Exception, status: int) -> None:
    found = api_error(error)
    assert found.status == status
    assert msgspec.json.decode(found.body).keys() == {"code", "message"}


def test_a_429_says_when_to_ask_again_and_no_other_error_does() -> None:
    assert ApiError(429, "LIMIT_EXCEEDED", "too many").headers == {"Retry-After": "1"}
    assert ApiError(409, "CONFLICT", "not now").headers == {}


def test_what_nobody_expected_says_nothing_about_the_server() -> None:
    assert "secret" not in api_error(ValueError("secret")).message
    assert "/home/me" not in api_error(OSError(errno.ENOENT, "x", "/home/me/file")).message


def test_paths_of_the_state_directory_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerPaths, "roots", ("/home/me/my state",))
    error = SetupError(
        "cannot open /home/me/my state/sandboxes/x: no, /home/me/my state/y", hint="rm /home/me/my state/z"
    )
    words = api_error(error).message
    assert "state" not in words and words.startswith("cannot open (a file of the server): no,")


def test_paths_of_cgroups_are_replaced() -> None:
    words = api_error(SetupError("cannot make /sys/fs/cgroup/user.slice/x: no")).message
    assert words == "cannot make (a file of the server): no"


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ("Expected `object | null`, got `str`", "must be an object or null, not text"),
        ("Expected `int` >= 1", "must be a whole number, at least 1"),
        ("Expected `array`, got `int` - at `$.a`", "must be a list, not a whole number - at `$.a`"),
        ("Object missing required field `uri`", "the field `uri` is missing"),
        ("Input data was truncated", "the body is JSON that breaks off"),
        (
            "JSON is malformed: trailing characters (byte 3)",
            "the body is not JSON: trailing characters (byte 3)",
        ),
        ("Invalid RFC3339 encoded datetime", "must be a time, such as 2027-01-31T12:00:00Z"),
        ("Object contains unknown field `shell`", "there is no field `shell`"),
        (
            "Invalid enum value 'x' - at `$.a`",
            "'x' is none of its values; /openapi.json of the server lists them - at `$.a`",
        ),
        ("what no one foresaw", "what no one foresaw"),
    ],
)
def test_what_the_decoder_says_is_put_into_plain_words(decoder: str, words: str) -> None:
    assert plain_words(decoder) == words
    assert api_error(msgspec.ValidationError(decoder)).message == words


def test_an_unknown_path_says_where_the_calls_are_listed() -> None:
    assert "/openapi.json" in api_error(NotFoundException()).message
    assert api_error(NotFoundException("there is no such file")).message == "there is no such file"


def test_a_control_that_this_machine_lacks_is_named_with_its_waiver_and_no_path_of_the_host() -> None:
    missing = {"native": {"limits.memory": "no cgroups", "limits.cpu": "no cgroups"}}
    hint = 'mkdir /sys/fs/cgroup/x\nor waive it in the policy: accept = ["limits.memory", "limits.cpu"]'
    words = api_error(UnsupportedError("not here", missing=missing, hint=hint)).message
    assert 'accept = ["limits.memory", "limits.cpu"]' in words and "/sys" not in words


def test_walls_that_do_not_come_up_make_a_create_unavailable() -> None:
    found = create_error(SetupError("user namespace: Operation not permitted", stage="namespaces"))
    assert (found.status, found.code) == (503, "SERVICE_UNAVAILABLE") and "not permitted" in found.message
    assert create_error(PolicyError("wrong")).status == 400
    assert create_error(ValueError("anything")).status == 500


def test_nobody_is_told_to_waive_a_control_that_is_missing_altogether() -> None:
    error = UnsupportedError("not here", missing={"native": {"files": "no namespaces"}}, hint="sysctl x")
    words = api_error(error).message
    assert "stockade doctor" in words and "accept" not in words and "sysctl" not in words
