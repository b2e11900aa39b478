"""The sealed channel: whatever is done to its messages on the way, none is taken for another."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from stockade.inside import channel_crypto
from stockade.inside.channel_crypto import KeyAgreement, Sealer, SealError, Unsealer

MANY = 1 << 30
ENGINES: list[Callable[[], object]] = [
    lambda: channel_crypto._OpenSSL(channel_crypto._load()),
    channel_crypto._cryptography,
]


@pytest.fixture(params=ENGINES, ids=["openssl", "cryptography"], autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_crypto, "_engines", [request.param()])


def ends(seen: bytes = b"seen", also: bytes = b"seen") -> tuple[Sealer, Unsealer, Sealer, Unsealer]:
    """What one end says, what the other hears, and the way back."""
    one, other = KeyAgreement(), KeyAgreement()
    out, back = one.agree(other.public, seen, first=True)
    answers, hears = other.agree(one.public, also, first=False)
    return out, hears, answers, back


def messages(sealer: Sealer, *records: bytes) -> list[bytes]:
    return [message for record in records for message in sealer.record(b"V", record)]


def test_records_arrive_as_they_were_however_they_are_cut() -> None:
    out, hears, answers, back = ends()
    records = [b"", b"x", bytes(range(256)) * 3000, b"last"]
    stream = b"".join(messages(out, *records))
    chance, found = random.Random(1), []
    while stream:
        size = chance.choice([1, 3, 1000, 300000])
        found += hears.feed(stream[:size], MANY)
        stream = stream[size:]
    assert found == [(b"V", record) for record in records]
    assert back.feed(b"".join(messages(answers, b"back")), MANY) == [(b"V", b"back")]


def test_the_two_implementations_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    one = KeyAgreement()
    monkeypatch.setattr(channel_crypto, "_engines", [channel_crypto._cryptography()])
    other = KeyAgreement()
    out, _ = one.agree(other.public, b"", first=True)
    _, hears = other.agree(one.public, b"", first=False)
    assert hears.feed(b"".join(messages(out, b"word")), MANY) == [(b"V", b"word")]


def test_what_is_sealed_shows_nothing_and_never_looks_the_same_twice() -> None:
    out, _, answers, _ = ends()
    sealed = [messages(end, b"the same secret")[0] for end in (out, out, answers, ends()[0])]
    assert len(set(sealed)) == 4 and not any(b"secret" in message for message in sealed)


def test_a_nonce_is_never_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    out, _, answers, _ = ends()
    used: list[tuple[bytes, bytes]] = []
    for end in (out, answers):
        real = end._cipher.encrypt
        end._cipher = type("Wire", (), {"encrypt": lambda self, nonce, beside, data, real=real: (
            used.append((nonce, beside)), real(nonce, beside, data))[1]})()  # fmt: skip
    for _ in range(300):
        messages(out, b"x")
        messages(answers, b"x")
    assert len(set(used)) == 600 and {len(nonce) for nonce, _ in used} == {channel_crypto.NONCE}
    assert {beside[:1] for _, beside in used} == {b">", b"<"}
    out._number = channel_crypto.MOST
    with pytest.raises(SealError, match="too many"):
        out.seal(b"")


def refused(hears: Unsealer, stream: bytes) -> None:
    with pytest.raises(SealError):
        hears.feed(stream, MANY)


def test_a_changed_byte_is_refused() -> None:
    for place in range(4, 4 + 2 + 24 + channel_crypto.TAG):
        out, hears, _, _ = ends()
        (message,) = messages(out, b"some words to be changed")
        changed = bytearray(message)
        changed[place] ^= 1
        refused(hears, bytes(changed))


def test_a_repeated_moved_missing_or_returned_message_is_refused() -> None:
    for choose in ((0, 0), (1, 0), (1,), (0, 2), (0, 1, 1)):
        out, hears, _, _ = ends()
        made = messages(out, b"a", b"b", b"c")
        refused(hears, b"".join(made[number] for number in choose))
    out, _, _, back = ends()
    refused(back, messages(out, b"to the other end")[0])


def test_a_message_of_another_run_key_or_transcript_is_refused() -> None:
    refused(ends()[1], messages(ends()[0], b"x")[0])
    out, hears, _, _ = ends(b"what one saw", b"what the other saw")
    refused(hears, messages(out, b"x")[0])


def test_what_is_cut_off_is_no_record() -> None:
    out, hears, _, _ = ends()
    made = messages(out, bytes(channel_crypto.CHUNK * 2 + 5))
    assert len(made) == 3 and hears.feed(b"".join(made)[:-1], MANY) == []
    out, hears, _, _ = ends()
    made = messages(out, bytes(channel_crypto.CHUNK * 2 + 5))
    refused(hears, made[0] + made[2])


def test_an_impossible_length_is_refused_at_once() -> None:
    for size in (0, 1, 17, channel_crypto.CHUNK + channel_crypto.TAG + 3, 1 << 31, (1 << 32) - 1):
        refused(ends()[1], channel_crypto.HEAD.pack(size))


def test_a_record_larger_than_what_is_taken_is_refused_before_it_is_whole() -> None:
    out, hears, _, _ = ends()
    with pytest.raises(OverflowError):
        for message in out.record(b"V", bytes(10 << 20)):
            hears.feed(message, 1 << 20)
    assert len(hears._content) <= 1 << 20


#: Points whose multiples are few: whoever sends one knows the secret.
LOW = [bytes(32), b"\1" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f"]


def test_a_key_that_is_none_is_refused() -> None:
    for key in (*LOW, b"", bytes(31), bytes(33)):
        with pytest.raises(SealError):
            KeyAgreement().agree(key, b"", first=True)
    mirrored = KeyAgreement()
    with pytest.raises(SealError):
        mirrored.agree(mirrored.public, b"", first=True)


def test_where_nothing_can_be_sealed_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(channel_crypto, "_engines", [])
    monkeypatch.setattr(channel_crypto, "_load", lambda: None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(SealError, match=r"libcrypto.so.3.*cryptography"):
        KeyAgreement()
