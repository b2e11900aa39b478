"""Streams of bytes with TLS, on sockets that do not block.

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

from stockade.egress.dialer import wait_readable, wait_writable
from stockade.egress.termination.authority import CertificateAuthority
from stockade.egress.termination.byte_stream import READ_SIZE, ByteStream, StreamError
from stockade.linux.root_certificates import system_bundle

HTTP2, HTTP1 = b"h2", b"http/1.1"
#: Of what a client may choose when it begins; the rest is TLS 1.3, which has no weak ones.
_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"
# <openssl/x509v3.h>
_NO_PARTIAL_WILDCARDS = 0x4
#: What pyOpenSSL has no name for: more randomness, and the name that a certificate must have.
_LIBRARY: Any = Binding().lib


class CertificateError(StreamError):
    """The server's certificate is not one for its name, from an authority that counts."""


class TlsStream(ByteStream):
    """A connection with TLS."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, tls: SSL.Connection
    ) -> None:
        super().__init__(loop, connection)
        self._tls = tls
        # Else it reads on while there are messages that are not data, of which a peer can send any number.
        _LIBRARY.SSL_clear_mode(tls._ssl, _LIBRARY.SSL_MODE_AUTO_RETRY)
        self.half_closes = False
        #: Gets the session of the connection when it ends, for the next one to the same server.
        self.on_end: Callable[[SSL.Session], None] = lambda _: None

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
        if self._socket.fileno() < 0:
            # OpenSSL knows the number of the socket alone, which may be that of another connection by now.
            return
        with contextlib.suppress(SSL.Error, OSError):
            self._tls.shutdown()
        if (session := self._tls.get_session()) is not None:
            self.on_end(session)
        super().end()

    @property
    def resumed(self) -> bool:
        """Whether the handshake went on with the keys of an earlier connection."""
        return bool(_LIBRARY.SSL_session_reused(self._tls._ssl))


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
    session: SSL.Session | None = None,
) -> TlsStream:
    """Return the side of the server, whose certificate must be one for the host.

    A session must come from a connection to the same host: its certificate is not verified again.
    """
    tls = SSL.Connection(context, connection)
    if session is not None:
        tls.set_session(session)
    tls.set_tlsext_host_name(host.encode("ascii"))
    if protocols:
        tls.set_alpn_protos(protocols)
    name, check = host.encode("ascii"), _LIBRARY.SSL_get0_param(tls._ssl)
    _LIBRARY.X509_VERIFY_PARAM_set_hostflags(check, _NO_PARTIAL_WILDCARDS)
    if _LIBRARY.X509_VERIFY_PARAM_set1_host(check, name, len(name)) != 1:
        raise CertificateError("certificate verify failed")
    tls.set_connect_state()
    return TlsStream(loop, connection, tls)
