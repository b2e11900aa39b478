"""Programs as people use them trust the authority of their sandbox, and send the requests that rules allow.

Each runs first without Stockade, as a control. Nothing is configured for any of them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from interop.egress.conftest import GIT
from interop.egress.test_programs import CLIENTS, WEBSOCKET
from support.internet_web import big_hash
from support.means import need_program
from support.network import Internet

API = "GET https://api.good.example/**"
JAVA = """
import java.net.*; import java.net.http.*;
public class Get {
    public static void main(String[] args) throws Exception {
        var request = HttpRequest.newBuilder(URI.create("https://api.good.example/by-java")).build();
        var body = HttpResponse.BodyHandlers.ofString();
        System.out.print(HttpClient.newHttpClient().send(request, body).body());
    }
}
"""
#: Requests of one connection after the other, a large upload, and one that no rule allows.
SCRIPT = """
for version in --http1.1 --http2; do
    url=https://h2.good.example
    curl -sS $version $url/ok/one $url/ok/two
    head -c 3000000 /dev/zero | curl -sS $version --data-binary @- $url/echo | sha256sum
    head -c 300000 /dev/zero | curl -sS $version -T - -X POST $url/echo | sha256sum
    curl -sS $version "$url/big?mb=16" | sha256sum
    curl -sS $version -o /dev/null -w '%{http_code} %{http_version}\\n' -I $url/ok/head
done
"""


def test_curl_speaks_both_versions_and_bodies_arrive_whole(do: Any) -> None:
    rules = ["* https://h2.good.example/**"]
    out = do(SCRIPT, rules).splitlines()
    for version, lines in zip(("1.1", "2"), (out[:6], out[6:]), strict=True):
        assert [json.loads(line)["path"] for line in lines[:2]] == ["/ok/one", "/ok/two"]
        # To a server that speaks HTTP/2 it is spoken, whatever the program speaks.
        assert json.loads(lines[0])["version"] == "2"
        assert [line.split()[0] for line in lines[2:5]] == [
            hashlib.sha256(bytes(3000000)).hexdigest(),
            hashlib.sha256(bytes(300000)).hexdigest(),
            big_hash(16),
        ]
        assert lines[5] == f"200 {version}"


def test_clients_in_python_trust_the_authority(do: Any) -> None:
    code = "\n".join(CLIENTS.values())
    out = do([sys.executable, "-c", code], [API]).split("\n\n")
    assert [json.loads(one)["path"] for one in out if one.strip()] == ["/x"] * len(CLIENTS)


def test_httpx_speaks_http_2_over_one_connection(do: Any, internet: Internet) -> None:
    code = (
        "import httpx\n"
        "with httpx.Client(http2=True) as client:\n"
        "    print([client.get('https://h2.good.example/').http_version for _ in range(3)])"
    )
    out = do([sys.executable, "-c", code], ["GET https://h2.good.example/"])
    assert out.strip() == str(["HTTP/2"] * 3)
    assert len(internet.events("connection")) == 1


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("wss://api.good.example/", "GET https://api.good.example/"),
        ("ws://www.good.example/", "GET http://www.good.example/"),
    ],
)
def test_a_websocket_passes_if_its_request_is_allowed(do: Any, url: str, rule: str) -> None:
    out = do([sys.executable, "-c", WEBSOCKET, url], [rule])
    assert out.splitlines() == ["welcome", "message 0", "message 1", "message 2"]


def test_pip_and_npm_and_git_and_node_trust_the_authority(
    do: Any, internet: Internet, packages: None, registry: None, repository: Path
) -> None:
    for program in ("npm", "node", "git"):
        need_program(program)
    internet.publish("git.good.example", repository.parent)
    script = (
        f"{sys.executable} -m pip --disable-pip-version-check -q install --no-cache-dir "
        "--index-url https://pypi.good.example/simple/ --target site first >&2; ls -d site/first.py\n"
        "npm install --silent --no-audit --no-fund --registry https://npm.good.example/ thing\n"
        "node -e 'console.log(require(\"thing\"))'\n"
        "git clone -q https://git.good.example/thing.git; cat thing/file\n"
        "node -e \"fetch('https://api.good.example/n').then(r => r.text()).then(t => console.log(t))\""
    )
    rules = [
        "GET https://pypi.good.example/simple/**", "GET https://npm.good.example/**",
        "GET https://git.good.example/thing.git/**", API,
    ]  # fmt: skip
    out = do(script, rules, "--read", os.path.dirname(os.path.dirname(sys.executable)), env=GIT).splitlines()
    assert out[:3] == ["site/first.py", "the thing", "from far away"]
    assert json.loads(out[3])["path"] == "/n"


def test_java_trusts_the_authority(internet: Internet, tmp_path: Path) -> None:
    need_program("java")
    file = tmp_path / "Get.java"
    file.write_text(JAVA)
    settings = [word for place in glob.glob("/etc/java-*") for word in ("--read", place)]
    result = internet.run(
        ["java", "-XX:TieredStopAtLevel=1", str(file)], [API], "--read", str(file), *settings
    )
    assert json.loads(result["stdout"])["path"] == "/by-java", result["stderr"]


def test_a_go_program_trusts_the_authority(do: Any) -> None:
    need_program("hey")
    out = do(["hey", "-n", "20", "-c", "2", "https://api.good.example/"], [API])
    assert "[200]\t20 responses" in out


def test_events_pass_one_by_one(internet: Internet) -> None:
    """Server-sent events: the program sees each when it is sent, not when the response ends."""
    server = (
        "import http.server, time\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.send_header('Content-Type', 'text/event-stream')\n"
        "        self.end_headers()\n"
        "        for n in range(3):\n"
        "            self.wfile.write(b'data: %d\\n\\n' % n)\n"
        "            time.sleep(0.4)\n"
        "    def log_message(self, *a): pass\n"
        "http.server.HTTPServer(('11.0.0.11', 8088), H).serve_forever()"
    )
    client = (
        "import time, urllib.request\n"
        "for _ in range(50):\n"
        "    try:\n"
        "        response = urllib.request.urlopen('http://www.good.example:8088/events'); break\n"
        "    except OSError: time.sleep(0.1)\n"
        "times = [time.monotonic() for line in response if line.strip()]\n"
        "print(len(times), times[-1] - times[0] > 0.5)"
    )
    with internet.server([sys.executable, "-c", server]):
        result = internet.run([sys.executable, "-c", client], ["GET http://www.good.example:8088/events"])
    assert result["stdout"] == "3 True\n", (result["stdout"], result["stderr"])


def test_a_client_that_pins_another_certificate_fails_with_a_hint(internet: Internet) -> None:
    """With the real authority alone in its store, a program does not accept the sandbox's."""
    code = (
        "import ssl, socket, sys\n"
        "context = ssl.create_default_context(cadata=open(sys.argv[1]).read())\n"
        "context.wrap_socket(socket.create_connection(('api.good.example', 443)),\n"
        "                    server_hostname='api.good.example')"
    )
    file = internet.trust["SSL_CERT_FILE"]
    result = internet.run([sys.executable, "-c", code, file], [API], "--read", file)
    assert result["exit_code"] == 1
    (failed,) = [one for one in result["network"] if one["verdict"] == "failed"]
    assert failed["reason"] == "certificate refused"
    assert "may pin" in result["hint"], result["hint"]
