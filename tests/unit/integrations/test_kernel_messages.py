"""What a relay lets pass of what a kernel sends."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.integrations.jupyter_relay import PLAIN_TYPES, filtered

KEY = b"the key of the connection"
DELIMITER = b"<IDS|MSG>"


def sign(parts: list[bytes]) -> bytes:
    made = hmac.new(KEY, digestmod=hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.hexdigest().encode()


def message(
    kind: str, content: Any, *, header: bytes | None = None, buffers: tuple[bytes, ...] = ()
) -> list[bytes]:
    parts = [header or json.dumps({"msg_type": kind, "msg_id": "1"}).encode(), b"{}", b"{}"]
    parts.append(content if isinstance(content, bytes) else json.dumps(content).encode())
    return [b"client", DELIMITER, sign(parts), *parts, *buffers]


def content_of(parts: list[bytes] | None) -> Any:
    assert parts is not None
    assert parts[:2] == [b"client", DELIMITER] and len(parts) == 7
    assert parts[2] == sign(parts[3:]), "clients drop what is not signed"
    return json.loads(parts[6])


def passed(kind: str, content: Any, allowed: tuple[str, ...] = PLAIN_TYPES) -> Any:
    return content_of(filtered(message(kind, content), allowed, sign))


@pytest.mark.parametrize("kind", ["display_data", "execute_result", "update_display_data", "inspect_reply"])
def test_only_allowed_types_of_a_bundle_pass(kind: str) -> None:
    data = {"text/plain": "1", "text/html": "<b>", "image/png": "aGk=", "application/javascript": "x()"}
    content = {"data": data, "metadata": {"image/png": {"width": 1}, "text/html": {}}, "transient": {"id": 1}}
    assert passed(kind, content) == {
        "data": {"text/plain": "1", "image/png": "aGk="},
        "metadata": {"image/png": {"width": 1}},
        "transient": {"id": 1},
    }
    assert passed(kind, content, ("text/html",))["data"] == {"text/html": "<b>"}


def test_a_type_that_is_not_text_does_not_pass() -> None:
    assert passed("display_data", {"data": {"text/plain": ["<b>"], "image/png": {"a": 1}}}) == {"data": {}}
    assert passed("display_data", {"data": "<b>", "metadata": []}) == {"data": {}, "metadata": {}}


@pytest.mark.parametrize(
    "kind", ["stream", "error", "status", "execute_input", "input_request", "complete_reply"]
)
def test_text_passes_as_it_is(kind: str) -> None:
    content = {"text": "\x1b[31m<script>", "name": "stdout"}
    assert passed(kind, content) == content


@pytest.mark.parametrize(
    "kind", ["comm_open", "comm_msg", "comm_close", "debug_event", "debug_reply", "", "x"]
)
def test_widgets_the_debugger_and_unknown_messages_do_not_pass(kind: str) -> None:
    assert filtered(message(kind, {"data": {"text/plain": "1"}}), PLAIN_TYPES, sign) is None


def test_a_reply_has_neither_links_nor_active_pages() -> None:
    info = passed(
        "kernel_info_reply", {"help_links": [{"url": "javascript:x()"}], "debugger": True, "banner": "b"}
    )
    assert info == {"help_links": [], "debugger": False, "banner": "b"}
    page = {"source": "page", "data": {"text/plain": "1", "text/html": "<b>"}}
    reply = {
        "status": "ok",
        "payload": [page, "x"],
        "user_expressions": {"a": {"data": {"text/html": "<b>"}}, "b": 1},
    }
    assert passed("execute_reply", reply) == {
        "status": "ok",
        "payload": [{"source": "page", "data": {"text/plain": "1"}}],
        "user_expressions": {"a": {"data": {}}},
    }
    assert passed("execute_reply", {"payload": 1, "user_expressions": []}) == {
        "payload": [],
        "user_expressions": {},
    }


def test_what_one_reader_could_read_otherwise_is_written_anew() -> None:
    twice = b'{"data": {"text/html": "<b>"}, "data": {"text/plain": "1"}}'
    assert passed("display_data", twice) == {"data": {"text/plain": "1"}}
    parts = filtered(message("display_data", twice), PLAIN_TYPES, sign)
    assert parts is not None and b"html" not in parts[6]
    header = b'{"msg_id": "1", "msg_type": "comm_open", "msg_type": "stream"}'
    parts = filtered(message("", {"text": "1"}, header=header), PLAIN_TYPES, sign)
    assert parts is not None and b"comm_open" not in parts[3]


def test_buffers_do_not_pass() -> None:
    assert content_of(filtered(message("stream", {"text": "1"}, buffers=(b"x", b"y")), PLAIN_TYPES, sign))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"client"],
        [DELIMITER],
        [DELIMITER, b"", b"{}", b"{}", b"{}"],
        [DELIMITER, b"", b"[]", b"{}", b"{}", b"{}"],
        [DELIMITER, b"", b'{"msg_type": "stream"}', b"{}", b"{}", b"{}"],
        [DELIMITER, b"", b'{"msg_id": "1", "msg_type": ["stream"]}', b"{}", b"{}", b"{}"],
        [DELIMITER, b"", b'{"msg_id": "1", "msg_type": "stream"}', b"{}", b"{}", b"[]"],
        [DELIMITER, b"", b'{"msg_id": "1", "msg_type": "stream"}', b"{}", b"{}", b"\xff"],
        [DELIMITER, b"", b'{"msg_id": "1", "msg_type": "stream"}', b"{}", b"{}", b"[" * 100_000],
    ],
)
def test_a_malformed_message_does_not_pass(parts: list[bytes]) -> None:
    assert filtered(parts, PLAIN_TYPES, sign) is None


@pytest.mark.parametrize("depth", [900, 960, 980, 985, 990, 995, 1000])
def test_content_that_is_almost_too_deep_passes_or_does_not(depth: int) -> None:
    deep = b'{"text": ' + b"[" * depth + b"]" * depth + b"}"
    parts = filtered(message("stream", deep), PLAIN_TYPES, sign)
    assert parts is None or content_of(parts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["data", "metadata", "payload", "user_expressions", "text/html", "text/plain"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(
    ["display_data", "execute_reply", "execute_result", "inspect_reply", "stream", "comm_msg"]
)


def bundles(content: Any, kind: str) -> list[Any]:
    """The places of a message from which frontends render."""
    if kind == "execute_reply":
        return [one.get("data") for one in (*content["payload"], *content["user_expressions"].values())]
    return [content.get("data")] if kind != "stream" else []


@given(kind=KINDS, content=JSON)
def test_no_content_gets_another_type_past_the_filter(kind: str, content: Any) -> None:
    parts = filtered(message(kind, content), PLAIN_TYPES, sign)
    if parts is not None:
        for data in bundles(content_of(parts), kind):
            assert data is None or set(data) <= set(PLAIN_TYPES)
            assert all(isinstance(value, str) for value in (data or {}).values())


@given(
    parts=st.lists(st.sampled_from([DELIMITER, b"{}", b"[]", b"null"]) | st.binary(max_size=20), max_size=9)
)
def test_any_parts_are_answered_without_an_error(parts: list[bytes]) -> None:
    filtered(parts, PLAIN_TYPES, sign)
