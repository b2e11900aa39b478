"""Requests inside the body of an allowed one, for servers that read a body as the next request."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attacks.egress.reach import Reach
from support.body_servers import NGINX, NODE, PORTS, RAW
from support.egress_rig import SERVER, EgressRig
from support.means import need_program
from support.network import Internet

WWW, ADDRESS = "www.good.example", "11.0.0.11"
#: Those that execute the body of a GET, as Python's own server does.
MISLED = ("early", "twice", "deaf", "http.server")
RULES = [f"GET,POST http://{WWW}:{port}/v1/**" for name, port in PORTS.items() if name != "tls"]
RULES.append(f"GET,POST https://{WWW}:{PORTS['tls']}/v1/**")


def head(method: str, target: str, host: str, more: str = "") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()


def with_body(method: str, target: str, host: str, body: bytes, more: str = "") -> bytes:
    return head(method, target, host, f"Content-Length: {len(body)}\r\n{more}") + body


def attacks(host: str) -> dict[str, bytes]:
    """Return what a program sends; only requests below /v1 are allowed."""
    hidden = head("DELETE", "/admin/all", host)
    unfinished = f"GET /admin/steal HTTP/1.1\r\nHost: {host}\r\nX: ".encode()
    allowed = head("GET", "/v1/next", host, "Authorization: Bearer of-the-next\r\n")
    expects = "Expect: 100-continue\r\n"
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden) + 2, b"\r\n" + hidden)
    return {
        "a body of GET": with_body("GET", "/v1/x", host, hidden),
        "a body of POST, before an allowed request": with_body("POST", "/v1/x", host, hidden) + allowed,
        "after an allowed request": allowed + with_body("GET", "/v1/x", host, hidden) + allowed,
        "the beginning of a head": with_body("GET", "/v1/x", host, unfinished) + allowed,
        "a body that its server does not expect": with_body("POST", "/v1/x", host, hidden, expects) + allowed,
        "in a chunk": head("POST", "/v1/x", host, "Transfer-Encoding: chunked\r\n") + chunk + allowed,
    }


@pytest.fixture(scope="module")
def executed(shared_internet: Internet) -> Iterator[Callable[[], list[list[str]]]]:
    """All the servers; the function returns what they executed since it was called last."""
    need_program("nginx"), need_program("node")
    place = Path(tempfile.mkdtemp(dir=shared_internet.directory))
    certificate, key = shared_internet.issue(WWW)
    (place / "nginx.conf").write_text(
        NGINX.format(place=place, address=ADDRESS, port=PORTS["nginx"], tls=PORTS["tls"],
                     behind=PORTS["http.server"], certificate=certificate, key=key)
    )  # fmt: skip
    logs = [place / name for name in ("python.log", "node.log", "nginx.log")]
    argv = [
        [sys.executable, "-m", "support.body_servers", ADDRESS],
        ["node", "-e", NODE, ADDRESS, str(PORTS["node"])],
        ["nginx", "-c", str(place / "nginx.conf"), "-e", str(place / "nginx.err")],
    ]
    read: dict[Path, int] = {}

    def since() -> list[list[str]]:
        found = []
        for log in logs:
            lines = log.read_text().splitlines() if log.exists() else []
            found += [json.loads(line) for line in lines[read.get(log, 0) :]]
            read[log] = len(lines)
        return found

    with (
        logs[0].open("w") as first, logs[1].open("w") as second,
        shared_internet.server(argv[0], stdout=first, env=_python_path()),
        shared_internet.server(argv[1], stdout=second),
        shared_internet.server(argv[2]),
    ):  # fmt: skip
        _await_ports(shared_internet)
        since()
        yield since
    shutil.rmtree(place, ignore_errors=True)


def _python_path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2])}


def _await_ports(internet: Internet) -> None:
    code = (
        "import socket, sys, time\n"
        "for port in map(int, sys.argv[2:]):\n"
        "    for _ in range(600):\n"
        "        try: socket.create_connection((sys.argv[1], port)).close(); break\n"
        "        except OSError: time.sleep(0.05)\n"
        "    else: sys.exit(f'nothing listens on {port}')\n"
    )
    done = internet.outside([sys.executable, "-c", code, ADDRESS, *map(str, PORTS.values())])
    assert done.returncode == 0, done.stderr


def talks(names: tuple[str, ...]) -> list[list[object]]:
    return [
        [WWW, PORTS[name], "http/1.1" if name == "tls" else "", [data.hex()], 0]
        for name in names
        for data in attacks(f"{WWW}:{PORTS[name]}").values()
    ]


def forbidden(found: list[list[str]]) -> set[str]:
    return {name for name, line, _ in found if "/admin" in line}


def test_no_server_takes_a_body_for_a_request(reach: Reach, executed: Callable[[], list[list[str]]]) -> None:
    names = tuple(name for name in PORTS if name != "deaf")
    reach.outside("judged", talks(names))
    before = executed()
    assert forbidden(before) >= set(MISLED) - {"deaf"}, "the control was not misled"
    assert any("/admin/steal" in line for _, line, _ in before), "the control stole nothing"
    inside = reach.inside("judged", talks(names), net=RULES)
    found = executed()
    assert forbidden(found) == set(), found
    sent = [data.count(b"/v1/") for name in names for data in attacks(f"{WWW}:{PORTS[name]}").values()]
    for number, (said, requests) in enumerate(zip(inside.verdict, sent, strict=True)):
        answers = bytes.fromhex(said)
        about = names[number // 6], list(attacks(""))[number % 6], answers
        # An answer before the end of the body may be the last of its connection.
        assert 1 <= answers.count(b"HTTP/1.1 200") <= requests, about


def test_what_a_server_that_heeds_nothing_does_with_a_body_is_beyond_the_rules(
    reach: Reach, executed: Callable[[], list[list[str]]]
) -> None:
    """It executes the hidden request, but gets no other with it, and its answer goes nowhere."""
    inside = reach.inside("judged", talks(("deaf",)), net=RULES)
    found = executed()
    assert forbidden(found) == {"deaf"}
    assert not [line for _, line, authorization in found if "/admin" in line and authorization]
    for said, data in zip(inside.verdict, attacks("").values(), strict=True):
        assert 1 <= bytes.fromhex(said).count(b"HTTP/1.1 200") <= data.count(b"/v1/"), bytes.fromhex(said)


def test_behind_a_gateway_each_request_still_has_one_answer(
    reach: Reach, executed: Callable[[], list[list[str]]]
) -> None:
    """nginx translates HTTP/2 to HTTP/1.1, over connections that it keeps, for a server that reads no body.

    Whether that server executes what is hidden there is between the two.
    """
    host = f"{WWW}:{PORTS['tls']}"
    hidden = head("DELETE", "/admin/all", host)
    sent = with_body("GET", "/v1/proxied", host, hidden) + head("GET", "/v1/next", host)
    inside = reach.inside("judged", [[WWW, PORTS["tls"], "http/1.1", [sent.hex()], 0]], net=RULES)
    assert bytes.fromhex(inside.verdict[0]).count(b"HTTP/1.1 ") == 2
    assert ["nginx", "GET /v1/next HTTP/2.0", ""] in executed()


SEND = """
import socket, sys
with socket.create_connection(("a.example", 80), 10) as end:
    end.sendall(bytes.fromhex(sys.argv[1])); end.settimeout(3); said = b""
    try:
        while said.count(b"HTTP/1.1 200") < 2 and (data := end.recv(65536)): said += data
    except TimeoutError: pass
    print(said.count(b"HTTP/1.1 200"))
"""


def test_a_plain_rule_lets_no_request_for_another_host_through_in_a_body(tmp_path: Path) -> None:
    found: list[str] = []
    hidden = head("GET", "/x", "evil.example")
    sent = with_body("GET", "/", "a.example", hidden) + head("GET", "/next", "a.example")
    with EgressRig(tmp_path, ["a.example:80"], [80]) as rig:
        rig.hosts["a.example"] = [SERVER]
        rig.serve(lambda end: RAW["early"].serve(end, "", lambda _, line, __: found.append(line)), 80)
        assert rig.python(SEND, sent.hex()) == "2"
        deadline = time.monotonic() + 5
        while len(found) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert found == ["GET / HTTP/1.1", "GET /next HTTP/1.1"]
