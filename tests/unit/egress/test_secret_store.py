"""Placeholders are replaced for the hosts and at the places that the policy names, and nowhere else."""

from __future__ import annotations

import base64
import os
import random
import time
from typing import Any

import pytest

from stockade.egress.records import RecordReader, RecordWriter, create_records
from stockade.egress.secrets import SecretStore, describe
from stockade.egress.termination.messages import RequestHead, ResponseHead
from stockade.egress.termination.secret_exchange import MOST_DECODED, SecretExchange

SEED = int(os.environ.get("STOCKADE_FUZZ_SEED", random.randrange(1 << 30)))
SECONDS = float(os.environ.get("STOCKADE_FUZZ_SECONDS", "2"))
KEY, OTHER = b"stockade0123456789abcdef0123456789ab", b"stockadeffffffffffffffffffffffffffff"
VALUE, SECOND = b"sk-real-5f2d8a91c7e3", b"another/value&with=signs"
HOST = ("https", "api.example.com", 443)


def store(*forms: str) -> SecretStore:
    found = SecretStore()
    load(found, (VALUE, SECOND), forms or ("bearer", "basic", "header:x-api-key", "query:key"))
    return found


def load(into: SecretStore, values: tuple[bytes, bytes], forms: Any) -> None:
    def fill(room: memoryview) -> int:
        room[:] = b"".join(values)
        return len(room)

    first = describe("KEY", KEY.decode(), [HOST], forms, len(values[0]))
    second = describe("OTHER", OTHER.decode(), [("https", "b.example", 443)], ["bearer"], len(values[1]))
    into.load([first, second], fill)


def basic(text: bytes) -> bytes:
    return b"Basic " + base64.b64encode(text)


def test_each_place_is_replaced_once() -> None:
    headers = [
        (b"authorization", b"Bearer " + KEY), (b"authorization", basic(b"u:" + KEY)),
        (b"x-api-key", KEY + KEY), (b"x-other", KEY), (b"cookie", b"a=" + KEY),
    ]  # fmt: skip
    found = store().rewrite(*HOST, b"/" + KEY + b"?key=" + KEY + b"&a=" + KEY, headers)
    assert [value for _, value in found.headers] == [
        b"Bearer " + VALUE, basic(b"u:" + VALUE), VALUE + KEY, KEY, b"a=" + KEY,
    ]  # fmt: skip
    assert found.target == b"/" + KEY + b"?key=" + VALUE + b"&a=" + KEY
    assert found.used == found.misplaced == ("KEY",)


@pytest.mark.parametrize("place", [("http", *HOST[1:]), ("https", "b.example", 443), (*HOST[:2], 8443)])
def test_another_scheme_host_or_port_gets_nothing(place: tuple[str, str, int]) -> None:
    headers = [(b"authorization", b"Bearer " + KEY)]
    found = store().rewrite(*place, b"/?key=" + KEY, headers)
    assert found.headers == headers and found.used == () and found.misplaced == ("KEY",)


def test_nothing_that_is_put_in_ends_a_parameter() -> None:
    found = SecretStore()
    load(found, (b"a&b=c d#e/f?g%h", SECOND), ["query:key"])
    assert found.rewrite(*HOST, b"/?key=" + KEY, ()).target == b"/?key=a%26b%3Dc%20d%23e%2Ff%3Fg%25h"


def test_no_value_goes_where_it_does_not_belong() -> None:
    draw = random.Random(SEED)
    words = [KEY, OTHER, b"Bearer ", b"Basic ", b"token ", b"key=", b"&", b"?", b"=", b" ", KEY[:9], b"x"]
    names = [b"authorization", b"x-api-key", b"x-other", b"cookie", b"proxy-authorization"]
    held = store()
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:

        def text() -> bytes:
            made = b"".join(draw.choice(words) for _ in range(draw.randrange(5)))
            return basic(made) if draw.random() < 0.2 else made

        headers = [(draw.choice(names), text()) for _ in range(draw.randrange(5))]
        target = b"/" + text()
        found = held.rewrite(*HOST, target, headers)
        assert not any(SECOND in value for _, value in found.headers), SEED
        for name, value in found.headers:
            assert VALUE not in value or name in (b"authorization", b"x-api-key"), SEED
        path, _, query = found.target.partition(b"?")
        assert VALUE not in path, SEED
        assert all(part.startswith(b"key=") for part in query.split(b"&") if VALUE in part), SEED


def exchange(
    held: SecretStore, place: tuple[str, str, int] = HOST, **fields: bytes
) -> tuple[Any, Any, list[Any]]:
    told: list[Any] = []
    head = RequestHead(
        "POST", *place, "/", tuple((name.replace("_", "-").encode(), value) for name, value in fields.items())
    )
    made = SecretExchange(held, head, lambda name, reason: told.append((name, reason)))
    return made, made.request_head(head), told


def test_a_body_is_rewritten_across_pieces_only_where_the_policy_says() -> None:
    body = b"secret=" + KEY + b"&x=1"
    for forms, wanted in ((("body",), b"secret=" + VALUE + b"&x=1"), (("bearer",), body)):
        for size in (1, 7, 100):
            made, _, told = exchange(store(*forms), content_type=b"application/x-www-form-urlencoded")
            passed = b"".join(made.request_data(body[at : at + size]) for at in range(0, len(body), size))
            assert passed + made.request_end() == wanted
            assert made.reframes_request is (forms == ("body",))
            assert told == [("KEY", "" if forms == ("body",) else "another place")]


def test_values_that_were_replaced_meanwhile_are_still_masked() -> None:
    held = store()
    made, head, _ = exchange(held, authorization=b"Bearer " + KEY)
    assert (b"authorization", b"Bearer " + VALUE) in head.fields
    load(held, (b"a-newer-value-0123", SECOND), ["bearer"])
    _, head, _ = exchange(held, authorization=b"Bearer " + KEY)
    assert (b"authorization", b"Bearer a-newer-value-0123") in head.fields
    made.response_head(ResponseHead(200, ()))
    assert VALUE not in made.response_data(b"<" + VALUE + b">") + made.response_end()


def test_replaced_values_are_wiped_when_nothing_uses_them() -> None:
    held = store()
    view = held.memory.values["KEY"]
    assert bytes(view) == VALUE
    load(held, (b"a-newer-value-0123", SECOND), ["bearer"])
    assert bytes(view) == bytes(len(VALUE))
    view = held.memory.values["KEY"]
    held.clear()
    assert not any(view) and not held


def test_decoded_answers_have_one_budget() -> None:
    import gzip

    from stockade.egress.termination.http1_heads import ResponseRefusedError

    held = store()
    bomb = gzip.compress(bytes(MOST_DECODED + 1))
    made, _, _ = exchange(held, authorization=b"Bearer " + KEY)
    made.response_head(ResponseHead(200, ((b"content-encoding", b"gzip"),)))
    with pytest.raises(ResponseRefusedError):
        made.response_data(bomb)
    assert 0 < held.decoded <= MOST_DECODED
    del made
    assert held.decoded == 0


def test_decoded_answers_count_until_the_program_has_them() -> None:
    import gzip

    held = store()
    made, _, _ = exchange(held, authorization=b"Bearer " + KEY)
    made.response_head(ResponseHead(200, ((b"content-encoding", b"gzip"),)))
    made.response_data(gzip.compress(bytes(1 << 20)))
    made.response_end()
    # Over HTTP/2 the whole answer may still wait for the program's window.
    assert held.decoded > 1000000
    del made
    assert held.decoded == 0


def test_a_websocket_of_a_server_that_has_a_secret_is_not_compressed() -> None:
    _, sent, _ = exchange(store(), upgrade=b"websocket", sec_websocket_extensions=b"permessage-deflate")
    assert dict(sent.fields) == {b"upgrade": b"websocket", b"accept-encoding": b"identity"}


@pytest.mark.parametrize("name", ["range", "if_range", "request_range", "accept_charset"])
def test_no_part_of_an_answer_and_no_other_letters_are_asked_for(name: str) -> None:
    _, sent, _ = exchange(store(), **{name: b"bytes=0-9"})
    assert dict(sent.fields) == {b"accept-encoding": b"identity"}


@pytest.mark.parametrize("charset", [b"UTF-16", b'"utf-16le"', b"utf-32", b"UCS-2", b"utf-7", b"ibm037"])
def test_answers_in_letters_that_cannot_be_searched_are_refused(charset: bytes) -> None:
    from stockade.egress.termination.http1_heads import ResponseRefusedError

    made, _, _ = exchange(store())
    with pytest.raises(ResponseRefusedError):
        made.response_head(ResponseHead(200, ((b"content-type", b"text/plain; Charset=" + charset),)))
    for known in (b"utf-8", b'"UTF-8"', b"us-ascii", b"iso-8859-1", b"windows-1252", b"latin1", b"binary"):
        made.response_head(ResponseHead(200, ((b"content-type", b"text/plain;charset=" + known),)))


def test_records_of_secrets_are_read_back() -> None:
    descriptor = create_records()
    try:
        writer = RecordWriter(descriptor)
        for name, reason in (("KEY", ""), ("KEY", "another host"), ("", "echoed")):
            writer.secret("api.example.com", 443, name, reason)
        found = [record for _, record in RecordReader(descriptor).changed_since(0)]
        assert {(one.kind, one.request, one.reason, one.verdict) for one in found} == {
            ("secret", "KEY", "", "allowed"),
            ("secret", "KEY", "another host", "denied"),
            ("secret", "", "echoed", "denied"),
        }
    finally:
        os.close(descriptor)
