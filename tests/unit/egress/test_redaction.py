"""Values are taken out of answers, however they are written, split and compressed; fuzzed."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
import random
import time
import zlib
from urllib.parse import quote

import pytest

from stockade.egress.redaction import (
    SLICE,
    BodyRedactor,
    Redactor,
    UnreadableError,
    lowered_forms,
    redact_headers,
    room_for,
    written_forms,
)

SEED = int(os.environ.get("STOCKADE_FUZZ_SEED", random.randrange(1 << 30)))
SECONDS = float(os.environ.get("STOCKADE_FUZZ_SECONDS", "2"))
VALUE = b'sk/real+"5f2d&8a91\\c7e3'


def forms_of(*values: bytes) -> list[memoryview]:
    found: list[memoryview] = []
    for value in values:
        view = memoryview(value)
        found += written_forms(view, memoryview(bytearray(room_for(view))))
    return found


def masked(text: bytes, sizes: list[int], *values: bytes) -> bytes:
    redactor, passed = Redactor(forms_of(*values)), b""
    for size in sizes:
        passed += redactor.feed(text[:size])
        text = text[size:]
    return passed + redactor.feed(text, end=True)


@pytest.mark.parametrize(
    "written",
    [
        VALUE,
        quote(VALUE, safe="").encode(),
        quote(VALUE, safe="").lower().encode(),
        json.dumps(VALUE.decode())[1:-1].encode(),
        json.dumps(VALUE.decode())[1:-1].replace("/", "\\/").encode(),
        html.escape(VALUE.decode()).encode(),
        quote(VALUE).encode(),
        # Go, GSON and .NET; templates of Go, Handlebars and Mustache
        rb"sk/real+\"5f2d\u00268a91\\c7e3",
        rb"sk/real\u002B\u00225f2d\u00268a91\\c7e3",
        rb"sk/real&#43;&#34;5f2d&amp;8a91\c7e3",
        rb"sk&#x2F;real+&quot;5f2d&amp;8a91\c7e3",
        VALUE.hex().encode(),
        VALUE.hex().upper().encode(),
        base64.b64encode(VALUE),
        base64.urlsafe_b64encode(b"a" + VALUE + b"b"),
        base64.b64encode(b"user:" + VALUE),
    ],
)
def test_a_value_is_masked_in_each_form_and_nothing_changes_its_length(written: bytes) -> None:
    if written == quote(VALUE, safe="").lower().encode():  # only the digits are in lower case
        written = b"".join(b"%%%02x" % byte if chr(byte) in '/+"&\\' else bytes([byte]) for byte in VALUE)
    text = b"before " + written + b" after"
    found = masked(text, [], VALUE)
    assert len(found) == len(text) and found.startswith(b"before ") and found.endswith(b" after")
    assert b"*" * 20 in found
    for at in range(len(written) - 12):
        assert written[at : at + 12] not in found


@pytest.mark.parametrize("written", [rb"c2stcmVhbA1234\u003d\u003d", b"c2stcmVhbA1234&#x3D;&#x3D;"])
def test_a_value_in_base64_is_masked_where_servers_escape_its_end(written: bytes) -> None:
    assert masked(b"<" + written + b">", [], b"c2stcmVhbA1234==") == b"<" + b"*" * len(written) + b">"


def test_any_split_anywhere_is_masked_alike() -> None:
    draw = random.Random(SEED)
    values = [VALUE, b"aaaaaaaaa", b"abababab", b"abababaxx"]
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        parts = [draw.choice([*values, *map(bytes, forms_of(VALUE)), b"a", b"ab", b"\n", os.urandom(3)])
                 for _ in range(draw.randrange(1, 12))]  # fmt: skip
        text = b"".join(parts)
        sizes = [draw.randrange(0, 9) for _ in range(len(text))]
        whole, split = masked(text, [], *values), masked(text, sizes, *values)
        assert whole == split, SEED
        assert len(whole) == len(text)
        assert not any(form in whole for form in map(bytes, forms_of(*values))), SEED


def test_how_much_waits_does_not_depend_on_the_value() -> None:
    """Otherwise a program could guess a value byte by byte, by what a server echoes late."""
    draw = random.Random(SEED)
    for _ in range(200):
        guess = bytearray(draw.choice(b"abc ") for _ in range(60))
        other = bytes(guess)
        guess[-10:] = VALUE[:10]
        passed = [len(Redactor(forms_of(VALUE)).feed(bytes(text))) for text in (guess, other)]
        assert passed[0] == passed[1]


def test_a_line_never_waits() -> None:
    redactor = Redactor(forms_of(VALUE))
    assert redactor.feed(b"data: one\n\n") == b"data: one\n\n"
    assert redactor.feed(b"data: " + VALUE[:9]) == b""
    assert redactor.feed(VALUE[9:] + b"\n\n") == b"data: " + b"*" * len(VALUE) + b"\n\n"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate", "two members"])
def test_compressed_bodies_are_searched(encoding: str) -> None:
    text = os.urandom(3000) + VALUE + bytes(100_000) + VALUE
    packed = {
        "gzip": gzip.compress(text),
        "deflate": zlib.compress(text),
        "raw deflate": zlib.compress(text)[2:-4],
        "two members": gzip.compress(text[:3005]) + gzip.compress(text[3005:]),
    }[encoding]
    body = BodyRedactor(forms_of(VALUE), ["deflate" if "deflate" in encoding else "gzip"])
    passed = b"".join(piece for at in range(0, len(packed), 7) for piece in body.feed(packed[at : at + 7]))
    passed += body.finish()
    assert len(passed) == len(text) and VALUE not in passed and passed.count(b"*" * len(VALUE)) == 2
    assert body.found >= 2


@pytest.mark.parametrize("encodings", [["br"], ["zstd"], ["gzip", "gzip"], ["gzip", "br"], ["compress"]])
def test_a_body_that_cannot_be_searched_is_refused(encodings: list[str]) -> None:
    with pytest.raises(UnreadableError):
        BodyRedactor([], encodings)


def test_hostile_compression_ends_in_a_refusal_or_in_bounded_pieces() -> None:
    draw = random.Random(SEED)
    sample = gzip.compress(VALUE * 100)
    for _ in range(300):
        data = bytearray(sample)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        body = BodyRedactor(forms_of(VALUE), ["gzip"])
        try:
            pieces = [*body.feed(bytes(data)), body.finish()]
        except UnreadableError:
            continue
        assert VALUE not in b"".join(pieces)
    bomb = BodyRedactor(forms_of(VALUE), ["gzip"])
    assert max(map(len, bomb.feed(gzip.compress(bytes(20 << 20))))) <= SLICE + 200


def test_headers_are_searched_by_name_and_value() -> None:
    fields = [(b"set-cookie", b"a=" + VALUE), (b"location", quote(VALUE, safe="").encode()), (b"x", b"y")]
    passed, found = redact_headers(fields, forms_of(VALUE), ())
    assert found == 2 and passed[2] == (b"x", b"y")
    assert all(VALUE not in value and b"5f2d" not in value for _, value in passed)


def test_a_value_is_found_in_the_name_of_a_header_which_is_in_small_letters() -> None:
    forms = forms_of(b"ghp_Real5F2d")
    lowered = lowered_forms(forms, memoryview(bytearray(sum(map(len, forms)))))
    fields = [(b"x-ghp_real5f2d-y", b"ghp_real5f2d"), (b"x-ghp_real", b"GHP_REAL5F2D")]
    passed, found = redact_headers(fields, forms, lowered)
    # The value of a header is compared as it is.
    assert passed == [(b"x-************-y", b"ghp_real5f2d"), fields[1]] and found == 1


def test_time_grows_with_the_length_alone() -> None:
    values = [b"a" * 64, b"ab" * 32]
    costs = []
    for size in (100_000, 400_000):
        text = b"ab" * (size // 2)
        began = time.process_time()
        masked(text, [1000] * (size // 1000), *values)
        costs.append(time.process_time() - began)
    assert costs[1] < 12 * max(costs[0], 0.005)
