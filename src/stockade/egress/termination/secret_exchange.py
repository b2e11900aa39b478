"""What happens to the secrets of a sandbox in one request and its response.

A request that the rules have allowed gets the values that it may have. What a server was sent, it may answer
through another port, without TLS, or by another name. So all servers whose requests are judged are asked for
answers without compression; an answer that is compressed all the same is decoded here, and one that cannot be
decoded is refused. Every byte that a program gets from such a server was searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from stockade.egress.redaction import BodyRedactor, Redactor, UnreadableError, redact_headers
from stockade.egress.secrets import BodyRewriter, PlaceholderScan, SecretStore
from stockade.egress.termination.http1_heads import ResponseRefusedError
from stockade.egress.termination.messages import Fields, HttpExchange, RequestHead, ResponseHead

#: How many bytes of compressed answers may be under way at once, decoded; all of an answer count until the
#: program has its end.
MOST_DECODED = 64 << 20

#: What servers are not asked for: answers that are compressed, parts of answers, which could
#: have a value in pieces, and other letters.
_LEFT_OUT = (
    b"accept-encoding", b"sec-websocket-extensions", b"range", b"if-range", b"request-range",
    b"accept-charset",
)  # fmt: skip
#: Answers whose letters are not those of ASCII.
_OTHER_LETTERS = re.compile(
    rb"charset\s*=\s*[\"']?\s*(?:utf[-_]?(?:7|16|32)|ucs|iso-10646|(?:cs)?unicode|ebcdic|"
    rb"(?:ibm|cp)[-_]?(?:037|500|875|1026|1047|11[46]))",
    re.IGNORECASE,
)

#: Told what became of a secret: its name, and a reason of `records.REASONS`, which is empty if it was sent.
Report = Callable[[str, str], None]


class SecretExchange(HttpExchange):
    """One request and its response, while the sandbox has secrets."""

    def __init__(self, store: SecretStore, head: RequestHead, report: Report) -> None:
        self._store, self._report = store, report
        self._place = head.scheme, head.host, head.port
        self._bound = store.is_bound(*self._place)
        self._reported: set[tuple[str, str]] = set()
        self._scan: PlaceholderScan = store.scan()
        self._rewriter: BodyRewriter | None = None
        #: As it is now: values that are replaced meanwhile may still come back.
        self._memory = store.memory
        self._forms = self._memory.forms
        self._body: BodyRedactor | None = None
        self._decoded = 0

    # The request

    def request_head(self, head: RequestHead) -> RequestHead:
        """Put values where placeholders are, and ask for an answer that can be searched."""
        rewritten = self._store.rewrite(*self._place, head.target.encode("ascii"), head.fields)
        self._tell(rewritten.used, rewritten.misplaced)
        fields = [one for one in rewritten.headers if one[0] not in _LEFT_OUT]
        fields.append((b"accept-encoding", b"identity"))
        self._rewriter = self._store.body_rewriter(*self._place, head.fields)
        self.reframes_request = self._rewriter is not None
        return head._replace(target=rewritten.target.decode("latin-1"), fields=tuple(fields))

    def request_data(self, data: bytes) -> bytes:
        """Replace placeholders where the policy says so, and look for those that stay."""
        if self._rewriter is not None:
            data = self._rewriter.feed(data)
        self._scan.feed(data)
        return data

    def request_end(self) -> bytes:
        """Return what was held back, and report the placeholders that were in the body."""
        rest = b""
        if self._rewriter is not None:
            rest = self._rewriter.feed(b"", end=True)
            self._tell(self._rewriter.used, ())
        self._scan.feed(rest)
        self._tell((), self._scan.seen)
        return rest

    def request_trailers(self, fields: Fields) -> Fields:
        """Report placeholders in trailers, where nothing is replaced."""
        for name, value in fields:
            self._scan.feed(b"\n" + name + b"\n" + value)
        self._tell((), self._scan.seen)
        return fields

    def _tell(self, used: object, misplaced: object) -> None:
        wrong = "another place" if self._bound else "another host"
        for names, reason in ((used, ""), (misplaced, wrong)):
            for name in sorted(names):  # type: ignore[call-overload]
                if (name, reason) not in self._reported:
                    self._reported.add((name, reason))
                    self._report(name, reason)

    # The response

    def response_head(self, head: ResponseHead) -> ResponseHead:
        """Mask values in a head; choose how the body is searched."""
        fields, found = redact_headers(head.fields, self._forms, self._memory.name_forms)
        self._tell_echo(found)
        if head.status < 200:
            return head._replace(fields=tuple(fields))
        encodings = [
            one
            for name, value in head.fields
            if name == b"content-encoding"
            for one in value.decode("latin-1").split(",")
        ]
        if any(name == b"content-type" and _OTHER_LETTERS.search(value) for name, value in head.fields):
            raise ResponseRefusedError("in letters that cannot be searched for secrets")
        try:
            self._body = BodyRedactor(self._forms, encodings)
        except UnreadableError:
            raise ResponseRefusedError("compressed in a way that was not asked for") from None
        if self._body.decodes:
            self.reframes_response = True
            dropped = (b"content-encoding", b"content-length", b"content-md5", b"etag", b"content-digest")
            fields = [one for one in fields if one[0] not in dropped]
        return head._replace(fields=tuple(fields))

    def response_words(self, words: bytes) -> bytes:
        """Mask values in the words of a status line."""
        redactor = Redactor(self._forms)
        passed = redactor.feed(words, end=True)
        self._tell_echo(redactor.found)
        return passed

    def response_data(self, data: bytes) -> bytes:
        """Return what was searched and may be passed on."""
        if self._body is None:
            return data
        passed = []
        try:
            for piece in self._body.feed(data):
                if self._body.decodes:
                    self._take_budget(len(piece))
                passed.append(piece)
        except UnreadableError:
            raise ResponseRefusedError("compressed data") from None
        return b"".join(passed)

    def response_end(self) -> bytes:
        """Return the rest."""
        if self._body is None:
            return b""
        try:
            rest = self._body.finish()
        except UnreadableError:
            raise ResponseRefusedError("compressed data") from None
        self._tell_echo(self._body.found)
        return rest

    def response_trailers(self, fields: Fields) -> Fields:
        """Mask values in trailers."""
        passed, found = redact_headers(fields, self._forms, self._memory.name_forms)
        self._tell_echo(found)
        return tuple(passed)

    def upgraded_data(self, data: bytes) -> bytes:
        """Mask values in bytes after an upgrade, each piece by itself: none may wait for the next."""
        redactor = Redactor(self._forms)
        passed = redactor.feed(data, end=True)
        self._tell_echo(redactor.found)
        return passed

    def _tell_echo(self, found: int) -> None:
        if found and ("", "echoed") not in self._reported:
            self._reported.add(("", "echoed"))
            self._report("", "echoed")

    def _take_budget(self, amount: int) -> None:
        if self._store.decoded + amount > MOST_DECODED:
            raise ResponseRefusedError("compressed data is too long")
        self._store.decoded += amount
        self._decoded += amount

    def __del__(self) -> None:
        self._store.decoded -= self._decoded
