"""Streams of bytes with or without TLS, on sockets that do not block.

OpenSSL reads and writes the sockets itself. Whatever needs a file or executable memory happens when this
module is loaded, which is in the template: the contexts, the host's own roots, and the one callback, which
chooses the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from cryptography import x509
from cryptography.hazmat.bindings.openssl.binding import Binding
from OpenSSL import SSL
from OpenSSL.crypto import X509, X509Store

from stockade.egress.dialer import wait_readable, wait_writable, wake
from stockade.egress.termination.authority import CertificateAuthority
from stockade.linux.root_certificates import system_bundle

READ_SIZE = 64 * 1024
HTTP2, HTTP1 = b"h2", b"http/1.1"
#: Of what a client may choose when it begins; the rest is TLS 1.3, which has no weak ones.
_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"
#: How long the other side may take to read what is written, in seconds.
_WRITE_SECONDS = 600.0
# <openssl/x509v3.h>
_NO_PARTIAL_WILDCARDS = 0x4
#: What pyOpenSSL has no name for: more randomness, and the name that a certificate must have.
_LIBRARY: Any = Binding().lib


class StreamError(Exception):
    """A stream broke: a reset, an end in the middle, or TLS that makes no sense."""


class CertificateError(StreamError):
    """The server's certificate is not one for its name, from an authority that counts."""


class ByteStream:
    """A connection without TLS."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self._loop, self._socket = loop, connection
        #: Whether the other side may read on after it has ended its own direction.
        self.half_closes = True
        #: What is told how many bytes were written.
        self.on_written: Callable[[int], None] = lambda _: None
        #: What may refuse to write so many bytes, by raising StreamError.
        self.before_write: Callable[[int], None] = lambda _: None

    async def wait(self) -> None:
        """Wait until something may have come."""
        await wait_readable(self._loop, self._socket)

    async def wait_with(self, other: ByteStream) -> None:
        """Wait until something may have come on this stream or on the other one."""
        future: asyncio.Future[None] = self._loop.create_future()
        numbers = self._socket.fileno(), other._socket.fileno()
        for number in numbers:
            self._loop.add_reader(number, wake, future)
        try:
            await future
        finally:
            for number in numbers:
                self._loop.remove_reader(number)

    def read_now(self) -> bytes | None:
        """Return what has come; b"" at the end, None if nothing has come."""
        try:
            return self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StreamError("reset") from error

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of it; waits as long as the other side does not read."""
        left = memoryview(data)
        self.before_write(len(left))
        while left:
            amount = self._write_now(left)
            if amount:
                self.on_written(amount)
                left = left[amount:]
            else:
                async with asyncio.timeout(_WRITE_SECONDS):
                    await wait_writable(self._loop, self._socket)

    def _write_now(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamError("reset") from error

    def end(self) -> None:
        """Tell the other side that nothing more comes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


class TlsStream(ByteStream):
    """A connection with TLS."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, tls: SSL.Connection
    ) -> None:
        super().__init__(loop, connection)
        self._tls = tls
        self.half_closes = False

    async def shake_hands(self) -> bytes:
        """Agree on keys; return the protocol that was chosen, b"" for none."""
        while True:
            try:
                self._tls.do_handshake()
                return bytes(self._tls.get_alpn_proto_negotiated())
            except SSL.WantReadError:
                await wait_readable(self._loop, self._socket)
            except SSL.WantWriteError:
                await wait_writable(self._loop, self._socket)
            except SSL.Error as error:
                raise _stream_error(error) from None

    def read_now(self) -> bytes | None:
        """Return what has come; b"" at the end, None if nothing has come."""
        try:
            return self._tls.recv(READ_SIZE)
        except (SSL.WantReadError, SSL.WantWriteError):
            return None
        except SSL.ZeroReturnError:
            return b""
        except SSL.Error as error:
            raise _stream_error(error) from None

    def _write_now(self, data: memoryview) -> int:
        try:
            return self._tls.send(data)
        except (SSL.WantWriteError, SSL.WantReadError):
            return 0
        except SSL.Error as error:
            raise _stream_error(error) from None

    def end(self) -> None:
        """Tell the other side that nothing more comes."""
        with contextlib.suppress(SSL.Error, OSError):
            self._tls.shutdown()
        super().end()


def _stream_error(error: SSL.Error) -> StreamError:
    words = str(error).lower()
    if "certificate verify failed" in words:
        return CertificateError("certificate verify failed")
    if "unknown ca" in words or "bad certificate" in words or "certificate unknown" in words:
        return StreamError("certificate refused")
    return StreamError("not TLS")


def _choose_protocol(connection: SSL.Connection, offered: list[bytes]) -> Any:
    wanted = connection.get_app_data()
    return wanted if wanted in offered else SSL.NO_OVERLAPPING_PROTOCOLS


def _server_context() -> SSL.Context:
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    _restrict(context)
    # No session outlives its connection: the keys for tickets are the template's, which all copies share.
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_CIPHER_SERVER_PREFERENCE)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_alpn_select_callback(_choose_protocol)
    return context


def _restrict(context: SSL.Context) -> None:
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_cipher_list(_CIPHERS)
    context.set_options(SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)


def client_context(roots: list[x509.Certificate] | str) -> SSL.Context:
    """Return what connects to servers whose certificates lead to these roots, or to those of a file."""
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    _restrict(context)
    context.set_verify(SSL.VERIFY_PEER)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    if isinstance(roots, str):
        if roots:
            context.load_verify_locations(roots)
        return context
    store = context.get_cert_store()
    assert isinstance(store, X509Store)
    for one in roots:
        store.add_cert(X509.from_cryptography(one))
    return context


_SERVER_CONTEXT = _server_context()
SYSTEM_CONTEXT = client_context(system_bundle())


def mix_randomness() -> None:
    """Give this copy of the template random numbers of its own.

    OpenSSL notices a fork by the number of the process, and copies can have equal ones, each in a namespace.
    """
    _LIBRARY.RAND_add(os.urandom(64), 64, 64.0)


def serve_tls(
    loop: asyncio.AbstractEventLoop,
    connection: socket.socket,
    host: str,
    authority: CertificateAuthority,
    protocol: bytes,
) -> TlsStream:
    """Return the side of the program, which sees a certificate for the host."""
    tls = SSL.Connection(_SERVER_CONTEXT, connection)
    found = authority.certificate_for(host)
    tls.use_certificate(found.certificate)
    tls.use_privatekey(found.key)
    tls.set_app_data(protocol)
    tls.set_accept_state()
    return TlsStream(loop, connection, tls)


def connect_tls(
    loop: asyncio.AbstractEventLoop,
    connection: socket.socket,
    host: str,
    context: SSL.Context,
    protocols: list[bytes],
) -> TlsStream:
    """Return the side of the server, whose certificate must be one for the host."""
    tls = SSL.Connection(context, connection)
    tls.set_tlsext_host_name(host.encode("ascii"))
    if protocols:
        tls.set_alpn_protos(protocols)
    name, check = host.encode("ascii"), _LIBRARY.SSL_get0_param(tls._ssl)
    _LIBRARY.X509_VERIFY_PARAM_set_hostflags(check, _NO_PARTIAL_WILDCARDS)
    if _LIBRARY.X509_VERIFY_PARAM_set1_host(check, name, len(name)) != 1:
        raise CertificateError("certificate verify failed")
    tls.set_connect_state()
    return TlsStream(loop, connection, tls)
