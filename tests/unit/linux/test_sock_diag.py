"""Questions about sockets, and answers that the kernel, or somebody else, has sent."""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
from collections.abc import Iterator

import pytest

from stockade.linux.sock_diag import decode_answer, encode_question, find_inode
from support.means import need

ENDS = ("198.18.0.2", 40000, "11.0.0.30", 7007)


@pytest.fixture
def netlink() -> Iterator[int]:
    one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 4)
    with one:
        yield one.fileno()


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
def connection(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family, address = request.param
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            need(False, "this kernel has no IPv6")
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as one, listener.accept()[0]:
            yield one


def ends_of(one: socket.socket) -> tuple[str, int, str, int]:
    return (*one.getsockname()[:2], *one.getpeername()[:2])


def answer(number: int = 7, inode: int = 99, ends: tuple[str, int, str, int] = ENDS, kind: int = 20) -> bytes:
    own, other = (socket.inet_aton(address).ljust(16, b"\0") for address in (ends[0], ends[2]))
    body = struct.pack("=BBBB", 2, 1, 0, 0) + struct.pack("!HH", ends[1], ends[3]) + own + other + bytes(12)
    body += struct.pack("=IIIII", 0, 0, 0, 1000, inode)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, number, 0) + body


def test_the_kernel_tells_the_socket_of_a_connection(netlink: int, connection: socket.socket) -> None:
    inode = os.fstat(connection.fileno()).st_ino
    assert find_inode(netlink, ends_of(connection), 1) == inode
    assert find_inode(netlink, ends_of(connection), 2) == inode


def test_a_connection_that_does_not_exist_has_none(netlink: int, connection: socket.socket) -> None:
    own, port, other, other_port = ends_of(connection)
    assert find_inode(netlink, (own, port, other, other_port ^ 1), 1) == 0
    connection.close()
    assert find_inode(netlink, (own, port, other, other_port), 2) == 0


def test_a_listener_is_not_taken_for_a_connection(netlink: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = ("127.0.0.1", listener.getsockname()[1], "127.0.0.1", 1)
        assert find_inode(netlink, ends, 1) == 0


def test_answers_to_earlier_questions_are_thrown_away(netlink: int, connection: socket.socket) -> None:
    ends = ends_of(connection)
    with socket.socket(fileno=os.dup(netlink)) as other:
        for number in range(3):
            other.sendto(encode_question(ends, number), (0, 0))
    assert find_inode(netlink, ends, 9) == os.fstat(connection.fileno()).st_ino


def test_an_answer_has_the_inode() -> None:
    assert decode_answer(answer(), ENDS, 7) == 99
    assert decode_answer(answer() + b"\x08\0\x08\0\1\0\0\0", ENDS, 7) == 99


@pytest.mark.parametrize(
    "rubbish",
    [
        b"", answer()[:-1], answer()[:16], answer(number=8), answer(kind=2), answer(kind=3), answer(inode=0),
        answer(ends=("198.18.0.2", 40001, "11.0.0.30", 7007)),
        answer(ends=("198.18.0.2", 40000, "11.0.0.30", 0)),
        struct.pack("=I", 2**32 - 1) + answer()[4:], struct.pack("=I", 0) + answer()[4:],
        struct.pack("=IHHIIi", 36, 2, 0, 7, 0, -2) + bytes(16),
    ],
)  # fmt: skip
def test_what_is_no_answer_has_none(rubbish: bytes) -> None:
    assert decode_answer(rubbish, ENDS, 7) == 0


def test_random_bytes_are_read_without_an_error() -> None:
    chance = random.Random(18)
    whole = answer()
    for _ in range(5000):
        block = bytearray(whole[: chance.randrange(len(whole) + 1)] + chance.randbytes(chance.randrange(40)))
        for _ in range(chance.randrange(6)):
            if block:
                block[chance.randrange(len(block))] = chance.randrange(256)
        assert 0 <= decode_answer(bytes(block), ENDS, 7) < 2**32


@pytest.mark.parametrize(
    "ends",
    [("", 1, "", 2), ("1.2.3.4", 1, "::1", 2), ("::1", 1, "1.2.3.4", 2), ("1.2.3.4", -1, "1.2.3.4", 2),
     ("1.2.3.4", 1, "1.2.3.4", 65536), ("fe80::1%lo", 1, "::1", 2)],
)  # fmt: skip
def test_what_is_no_connection_is_never_asked(netlink: int, ends: tuple[str, int, str, int]) -> None:
    with pytest.raises(ValueError, match="not the ends of a connection"):
        encode_question(ends, 1)
    assert find_inode(netlink, ends, 1) == 0


def test_a_question_has_the_size_that_the_kernel_expects() -> None:
    question = encode_question(ENDS, 5)
    assert len(question) == 72 and int.from_bytes(question[:4], sys.byteorder) == 72
