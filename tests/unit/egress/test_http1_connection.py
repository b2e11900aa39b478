"""Requests of HTTP/1.1: where one ends, whether another may follow, and on which connection to the server."""

from __future__ import annotations

import pytest

from support.http_pipes import ONE, Passage, pass_through

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def head(method: str = "GET", target: str = "/ok/x", more: str = "") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: a.test\r\n{more}\r\n".encode()


GET = head()
POST = head("POST", more="Content-Length: 5\r\n") + b"hello"
CHUNKED = head("POST", more="Transfer-Encoding: chunked\r\n")


def talk(*sent: bytes, answer: bytes = ANSWER, pause: float = 0.05) -> Passage:
    """Send pieces; the server answers once for each head that it reads."""
    return pass_through(ONE, sent, lambda data: answer * data.count(b"host: "), pause=pause)


def requests(found: Passage) -> list[list[str]]:
    """The requests of each connection to the server."""
    return [
        [line.split(" HTTP")[0] for line in one.decode("latin-1").split("\r\n") if line.endswith(" HTTP/1.1")]
        for one in found.reached
    ]


def test_nothing_follows_a_body_that_was_refused_while_the_answer_came() -> None:
    """The server still waits for the rest of the body, and would read the next request as that."""
    found = talk(CHUNKED, b"xyz\r\n" + GET)
    assert b"GET" not in b"".join(found.reached)


def test_requests_without_a_body_share_a_connection_and_others_have_one_each() -> None:
    found = talk(
        GET
        + GET
        + POST
        + GET
        + CHUNKED
        + b"3\r\nabc\r\n0\r\n\r\n"
        + head("POST", more="Content-Length: 0\r\n")
    )
    assert requests(found) == [
        ["GET /ok/x", "GET /ok/x", "GET /ok/x", "POST /ok/x"], ["POST /ok/x"], ["POST /ok/x"],
    ]  # fmt: skip
    assert [b"connection: close" in one for one in found.reached] == [False, True, True]
    assert found.said.count(b"HTTP/1.1 200") == 6 and b"connection: close" not in found.said


def test_a_first_request_with_a_body_uses_the_connection_that_is_there() -> None:
    assert requests(talk(POST + GET)) == [["POST /ok/x"], ["GET /ok/x"]]


@pytest.mark.parametrize("late", [False, True])
def test_what_a_server_sends_unasked_is_never_an_answer(late: bool) -> None:
    """The next request is buffered already, or comes later."""
    twice = ANSWER + ANSWER.replace(b"ok", b"no")
    found = talk(*([GET, GET] if late else [GET + GET + GET]), answer=twice)
    assert b"no" not in found.said and b"ok" in found.said
    assert all(len(one) == 1 for one in requests(found))


def test_the_program_gets_100_from_here_and_the_server_is_asked_for_nothing() -> None:
    expects = head("POST", more="Expect: 100-continue\r\nContent-Length: 5\r\n")
    found = talk(expects, b"hello", answer=b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER)
    assert found.said.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    assert found.said.count(b"100 Continue") == 1 and b"expect" not in found.reached[0].lower()
    refused = talk(head("POST", more="Expect: something\r\nContent-Length: 5\r\n"))
    assert refused.said.startswith(b"HTTP/1.1 400") and refused.reached == [b""]
    assert b"Stockade refused a request: its Expect is not 100-continue" in refused.said
    early = talk(expects, answer=ANSWER.replace(b"200 OK", b"417 No"))
    assert b"HTTP/1.1 417" in early.said


def test_a_body_until_the_end_of_the_connection_has_an_end_of_its_own_here() -> None:
    found = pass_through(ONE, [GET + GET], lambda _: b"HTTP/1.1 200 OK\r\n\r\nall", once=True)
    assert found.said.count(b"transfer-encoding: chunked\r\n\r\n3\r\nall\r\n0\r\n\r\n") == 2
    old = pass_through(
        ONE, [GET.replace(b"1.1", b"1.0") + GET], lambda _: b"HTTP/1.1 200 OK\r\n\r\nall", once=True
    )
    assert old.said.endswith(b"connection: close\r\n\r\nall")


@pytest.mark.parametrize(
    ("body", "passed", "reason"),
    [
        (b"5;ext=1\r\nhello\r\n", b"", "chunk size"),
        (b"5 \r\nhello\r\n", b"", "chunk size"),
        (b"0x5\r\nhello\r\n", b"", "chunk size"),
        (b"-1\r\n", b"", "chunk size"),
        (b"\r\n", b"", "chunk size"),
        (b"0" * 16 + b"\r\n", b"", "chunk size"),
        (b"5\nhello\r\n", b"", "chunk size"),
        (b"5\r\nhelloX\r\n", b"5\r\nhello\r\n", "chunk size"),
        (b"0\r\nHost: evil.test\r\n\r\n", b"", "trailer that must be a header"),
        (b"0\r\nx_http_method: DELETE\r\n\r\n", b"", "trailer that must be a header"),
        (b"0\r\n folded\r\n\r\n", b"", "folded header"),
        (b"0\r\n" + GET, b"", "name of a header"),
    ],
)
def test_chunks_that_a_server_could_read_differently_are_refused(
    body: bytes, passed: bytes, reason: str
) -> None:
    found = pass_through(ONE, [CHUNKED + body], lambda _: b"")
    assert found.reached[0].partition(b"\r\n\r\n")[2] == passed
    assert found.judged[-1].reason == "not HTTP" and found.judged[-1].text == reason
