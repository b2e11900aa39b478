"""What an egress process refuses in the bytes of a client: hellos and requests that name another host."""

from __future__ import annotations

import asyncio

from stockade.egress.decoders.http_requests import BAD_IN_LINE, RequestRefusedError, bad_byte
from stockade.egress.decoders.tls_hello import ClientHello, HelloError, HelloReader, NotTlsError
from stockade.egress.relay import Relay
from stockade.egress.termination.http1_heads import HEAD_SIZE, decode_request, refusal_of

#: The longest hello on a port that need not have one.
_HELLO_SIZE = 16 * 1024
# Fatal TLS alerts, as records: the name is not one that is served; access is denied.
_UNRECOGNIZED_NAME = bytes((21, 3, 3, 0, 2, 2, 112))
_ACCESS_DENIED = bytes((21, 3, 3, 0, 2, 2, 49))


class RefusalError(Exception):
    """A connection that is refused after something was read; `last_words` are what the client gets."""

    def __init__(self, reason: str, last_words: bytes = b"") -> None:
        super().__init__(reason)
        self.reason, self.last_words = reason, last_words


class HelloCheck:
    """Holds what a client of a name sends first until it is no TLS hello, or one with the right name."""

    def __init__(self, loop: asyncio.AbstractEventLoop, relay: Relay, name: str, seconds: float) -> None:
        self._loop, self._relay, self._name, self._seconds = loop, relay, name, seconds
        self._reader = HelloReader()
        self._timer: asyncio.TimerHandle | None = None

    def pass_hello(self, data: bytes) -> bytes:
        """Return what may be sent on."""
        try:
            hello = self._reader.feed(data)
            if hello is None and len(self._reader.received) > _HELLO_SIZE:
                raise RefusalError("limit", _ACCESS_DENIED)
            if hello is None:
                # A client may wait as long as it likes for the server's greeting, but not in a hello.
                if self._timer is None:
                    late = ("failed", "timed out")
                    self._timer = self._loop.call_later(self._seconds, self._relay.abort, *late)
                    # A timer keeps all of its relay in memory.
                    self._relay.finished.add_done_callback(lambda _: self._cancel())
                return b""
            check_name(hello, self._name)
        except NotTlsError:
            pass
        except HelloError:
            self._refuse("not TLS", _ACCESS_DENIED)
        except RefusalError as error:
            self._refuse(error.reason, error.last_words)
        self._cancel()
        self._relay.outgoing.check = None
        return bytes(self._reader.received)

    def _refuse(self, reason: str, last_words: bytes) -> None:
        # What was received goes nowhere, and need not wait in memory until the client has read why.
        self._reader = HelloReader()
        self._relay.refuse(reason, last_words)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class HeldBytes:
    """How many bytes all clients together have sent that are not judged yet."""

    def __init__(self, limit: int) -> None:
        self._limit, self._amount = limit, 0

    def add(self, amount: int) -> bool:
        """Count bytes, or no longer count them if negative; return whether they are within the limit."""
        self._amount += amount
        return self._amount <= self._limit


def read_hello(reader: HelloReader, data: bytes) -> ClientHello | None:
    """Return the hello of a client on port 443 once it is complete; refuse anything else."""
    try:
        return reader.feed(data)
    except NotTlsError:
        raise RefusalError("not TLS") from None
    except HelloError:
        raise RefusalError("not TLS", _ACCESS_DENIED) from None


def check_name(hello: ClientHello, name: str) -> None:
    """Refuse a hello that does not name the host that the program looked up."""
    if not hello.name:
        raise RefusalError("no SNI", _UNRECOGNIZED_NAME)
    if hello.name != name:
        raise RefusalError("SNI differs", _UNRECOGNIZED_NAME)


def names_host(data: bytearray, new: int, name: str, port: int) -> bool:
    """Return whether a client on port 80 has sent the head of its first request; refuse a wrong one.

    The last `new` bytes of its data have not been looked at yet.
    """
    searched = len(data) - new
    end = data.find(b"\r\n\r\n", max(0, searched - 3)) + 4
    stop = end if end > 3 else len(data)
    try:
        if found := BAD_IN_LINE.search(data, max(0, searched - 1), stop):
            raise RequestRefusedError(bad_byte(found[0]))
        if stop > HEAD_SIZE:
            raise RequestRefusedError("head too long")
        if end > 3:
            decode_request(bytes(data[:end]), "http", name, port)
    except RequestRefusedError as error:
        refused = refusal_of(error)
        raise RefusalError(refused.reason, refused.response) from None
    return end > 3
