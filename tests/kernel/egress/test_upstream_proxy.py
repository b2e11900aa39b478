"""The host's own proxy: connections leave through it, and its password appears nowhere."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.internet_layout import ECHO
from support.network import Internet
from support.paths import ROOT

PORT = 3129
SECRET = "s3cret/word"
PROXY = f"http://ada:s3cret%2Fword@127.0.0.1:{PORT}"


class Upstream:
    """A proxy that runs, and what it was asked for."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines

    def next(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self._lines.readline())
        return found


@contextlib.contextmanager
def upstream(internet: Internet, *words: str) -> Iterator[Upstream]:
    command = [sys.executable, "-m", "support.upstream_proxy", str(PORT), *words]
    env = {"PYTHONPATH": str(ROOT / "tests")}
    with internet.server(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and json.loads(process.stdout.readline()) == "listening"
        with process.stdout:
            yield Upstream(process.stdout)


CURL = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "https://api.good.example/"]


def test_it_is_asked_for_the_name_and_nothing_is_resolved_here(internet: Internet, tmp_path: Path) -> None:
    receipt = tmp_path / "receipt"
    with upstream(internet) as proxy:
        result = internet.run(
            CURL, ["api.good.example"], "--receipt", str(receipt), env={"HTTPS_PROXY": PROXY}
        )
        assert result["stdout"] == "200", result
        assert proxy.next() == {"place": "api.good.example:443", "secret": f"ada:{SECRET}"}
    (connection,) = [one for one in result["network"] if one["kind"] == "connect"]
    assert connection["address"] == "127.0.0.1"
    shown = internet.stockade("receipts", "show", "--json", str(receipt))
    text = shown.stdout or receipt.read_text()
    planned = internet.stockade("plan", "--net", "api.good.example", "--", "true", env={"HTTPS_PROXY": PROXY})
    assert f"through the proxy of your environment: HTTPS_PROXY 127.0.0.1:{PORT}" in planned.stdout
    for said in (json.dumps(result), text, receipt.read_text(), planned.stdout, planned.stderr):
        assert "s3cret" not in said


@pytest.mark.parametrize(
    "direct", ["api.good.example", ".good.example", "good.example:443", "*", "x, *.good.example"]
)
def test_no_proxy_names_what_is_dialled_directly(internet: Internet, direct: str) -> None:
    env = {"HTTPS_PROXY": "http://127.0.0.1:1", "NO_PROXY": direct}
    assert internet.run(CURL, ["api.good.example"], env=env)["stdout"] == "200"
    assert "api.good.example" in internet.asked()


def test_socks_takes_everything_else_too(internet: Internet) -> None:
    code = (
        f"import socket; one = socket.create_connection(('echo.good.example', {ECHO})); one.sendall(b'hi'); "
        "print(one.recv(2).decode())"
    )
    with upstream(internet) as proxy:
        env = {"ALL_PROXY": f"socks5h://ada:s3cret%2Fword@127.0.0.1:{PORT}"}
        result = internet.run(["/usr/bin/python3", "-c", code], [f"tcp://echo.good.example:{ECHO}"], env=env)
        assert result["stdout"].strip() == "hi", result
        assert proxy.next() == {"place": f"echo.good.example:{ECHO}", "secret": f"ada:{SECRET}"}
        # Without ALL_PROXY, only rules that look into a connection are for the web.
        env = {"HTTPS_PROXY": "http://127.0.0.1:1"}
        result = internet.run(["/usr/bin/python3", "-c", code], [f"tcp://echo.good.example:{ECHO}"], env=env)
        assert result["stdout"].strip() == "hi", result


def test_a_proxy_that_refuses_or_is_not_there_is_named(internet: Internet) -> None:
    with upstream(internet, "refuse"):
        result = internet.run(CURL, ["api.good.example"], env={"HTTPS_PROXY": PROXY})
    assert "proxy refused" in {one["reason"] for one in result["network"]}
    result = internet.run(CURL, ["api.good.example"], env={"HTTPS_PROXY": "http://127.0.0.1:1"})
    assert "connection refused" in {one["reason"] for one in result["network"]}
    assert "api.good.example" not in internet.asked()


@pytest.mark.parametrize(
    "value", ["https://me:s3cret@proxy.example:443", "socks4://s3cret@p", "http://a:s3cret@b@c", "://"]
)
def test_a_proxy_that_stockade_cannot_use_is_refused_and_not_shown(internet: Internet, value: str) -> None:
    done = internet.stockade("run", "--net", "api.good.example", "--", "true", env={"HTTPS_PROXY": value})
    assert done.returncode != 0 and "HTTPS_PROXY" in done.stderr and "unset HTTPS_PROXY" in done.stderr
    assert "s3cret" not in done.stderr + done.stdout


def test_programs_cannot_use_it_themselves(internet: Internet) -> None:
    """The egress process may dial its port, and no rule leads there."""
    code = (
        "import socket\n"
        f"for host, port in (('127.0.0.1', {PORT}), ('11.0.0.1', {PORT}), ('198.18.0.1', {PORT})):\n"
        "    try:\n"
        "        one = socket.create_connection((host, port), timeout=3)\n"
        "        one.sendall(b'CONNECT evil.example:80 HTTP/1.1\\r\\n\\r\\n'); print(one.recv(20))\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
    )
    with upstream(internet):
        result = internet.run(
            ["/usr/bin/python3", "-c", code], ["api.good.example"], env={"HTTPS_PROXY": PROXY}
        )
    assert result["stdout"].split() == ["ConnectionRefusedError"] * 3


def test_requests_are_judged_counted_and_get_values_through_both_proxies(
    internet: Internet, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.touch()
    internet.handle("api.good.example", "support.secret_servers:keep", file=str(kept))
    value, host = "sk-real-5f2d8a91c7e34b60", "api.good.example"
    program = """
get() { curl -sS -o /dev/null -w "%{http_code} " -H "Authorization: Bearer $API_KEY" "$@"; }
get https://api.good.example/ok/1
get https://api.good.example/no
get -x socks5h://198.18.0.1:3128 https://api.good.example/ok/2
get -x socks5h://198.18.0.1:3128 https://api.good.example/no
get --noproxy '*' https://api.good.example/ok/3
"""
    code = f"""
import json, stockade
secret = {{"from_env": "API_KEY", "hosts": [{host!r}]}}
policy = stockade.Policy(
    net=["GET https://{host}/ok/**"], proxy=True, limits={{"requests": 2}}, secrets={{"API_KEY": secret}}
)
result = stockade.run(["sh", "-c", {program!r}], policy)
print(json.dumps([result.text, [one.reason for one in result.network], repr(result)]))
"""
    with upstream(internet) as proxy:
        env = {"API_KEY": value, "HTTPS_PROXY": PROXY, **internet.trust}
        done = internet.python(code, env=env)
        assert done.returncode == 0, done.stderr
        text, reasons, shown = json.loads(done.stdout)
        assert text.split() == ["200", "403", "200", "403", "403"], (text, reasons)
        assert proxy.next() == {"place": "api.good.example:443", "secret": f"ada:{SECRET}"}
    arrived = [json.loads(line)["headers"]["authorization"] for line in kept.read_text().splitlines()]
    assert arrived == [f"Bearer {value}"] * 2
    assert "limits.requests" in reasons and value not in shown and "s3cret" not in shown
