"""The value of a secret: a program sends its placeholder elsewhere, and has a server send the value back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attacks.egress.reach import Inside, Reach
from support.screen import STOCKADE

VALUE = "sk/real+5f2d8a91c7e34b60"
BOUND, OTHER, ECHO = "api.good.example", "www.good.example", "web.good.example"
NET = [f"* https://{host}/**" for host in (BOUND, OTHER, ECHO)]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(VALUE)
    return file


@pytest.fixture
def kept(reach: Reach, tmp_path: Path) -> Path:
    """Where two hosts, of which one may have the value, keep what they get."""
    file = tmp_path / "kept.jsonl"
    file.touch()
    for host in (BOUND, OTHER):
        reach.internet.handle(host, "support.secret_servers:keep", file=str(file))
    reach.internet.handle(ECHO, "support.secret_servers:echo")
    return file


def request(line: str, host: str, *headers: str, body: str = "") -> str:
    return "\r\n".join([f"{line} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", body])


def attack(reach: Reach, token: Path, requests: list[list[Any]], **clauses: Any) -> Inside:
    secret = {"from_file": str(token), "hosts": [BOUND, ECHO], **clauses}
    roots = {"net_roots": str(reach.internet.bundle)}
    found = reach.inside("placeholder", requests, net=NET, secrets={"API_KEY": secret}, **roots)
    assert VALUE not in json.dumps(found.result)
    return found


def control(reach: Reach, requests: list[list[Any]]) -> Any:
    return reach.outside("placeholder", requests, VALUE, str(reach.internet.bundle))


def arrived(file: Path) -> list[str]:
    lines = file.read_text().splitlines()
    file.write_text("")
    return lines


LONG = "x" * 220
AUTHORIZED = "Authorization: Bearer {KEY}"
MISPLACED = {
    "in a header for another host": (OTHER, request("GET /", OTHER, AUTHORIZED), []),
    "as a password for another host": (OTHER, request("GET /", OTHER, "Authorization: Basic {BASIC}"), []),
    "in the path": (BOUND, request("GET /v1/{KEY}", BOUND), []),
    "in the query": (BOUND, request("GET /v1?key={KEY}", BOUND), []),
    "in another header": (BOUND, request("GET /", BOUND, "X-Debug: {KEY}"), []),
    "in a cookie": (BOUND, request("GET /", BOUND, "Cookie: a={KEY}"), []),
    "in a body": (
        BOUND, request("POST /", BOUND, "Content-Length: 64", body="{KEY}".ljust(64 - 31)), []
    ),
    "in a body, split between two pieces": (
        BOUND, request("POST /", BOUND, "Content-Length: 64", body="{KEY}".ljust(64 - 31)), [110]
    ),
    "in chunks, split": (
        BOUND,
        request("POST /", BOUND, "Transfer-Encoding: chunked", body="100\r\n{KEY}" + LONG + "\r\n0\r\n\r\n"),
        [112, 3, 5],
    ),
    "in a trailer": (
        BOUND,
        request("POST /", BOUND, "Transfer-Encoding: chunked", body="1\r\nx\r\n0\r\nX-Key: {KEY}\r\n\r\n"),
        [],
    ),
}  # fmt: skip


def test_a_placeholder_is_replaced_nowhere_but_where_the_policy_says_and_that_is_recorded(
    reach: Reach, token: Path, kept: Path
) -> None:
    def exact(host: str, text: str, length: int) -> str:
        """A body whose length is announced: the placeholder has another length than the value."""
        if "Content-Length: 64" not in text:
            return text.replace("100\r\n{KEY}", f"{length + 220:x}\r\n{{KEY}}")
        head, _, _ = text.partition("\r\n\r\n")
        return f"{head}\r\n\r\n{{KEY}}".replace("Content-Length: 64", f"Content-Length: {length}")

    for size, run in ((36, "inside"), (len(VALUE), "outside")):
        requests = [
            [host, exact(host, text, size), pieces, 0.05] for host, text, pieces in MISPLACED.values()
        ]
        requests.append([BOUND, request("GET /", BOUND, AUTHORIZED), [], 0])
        if run == "outside":
            assert all("thank you" in one for one in control(reach, requests))
            assert (
                sum(VALUE in line for line in arrived(kept)) >= len(MISPLACED) - 2
            )  # base64, and no trailers
            continue
        found = attack(reach, token, requests)
        assert all("thank you" in one for one in found.verdict), found.verdict
        *misplaced, right = arrived(kept)
        assert VALUE in right
        assert not any(VALUE in line for line in misplaced) and len(misplaced) == len(MISPLACED)
        told = {(one["name"], one["reason"]): one["count"] for one in found.decisions("secret")}
        assert told[(OTHER, "another host")] == 2
        assert told[(BOUND, "another place")] == len(MISPLACED) - 2
        assert told[(BOUND, "")] == 1
        walls = {(one["what"], one["wall"]) for one in found.result["denials"]}
        assert walls == {("secret", "secrets")}


ECHOES = [
    "plain", "chunks", "slow-chunks", "gzip", "gzip-chunks", "deflate", "header", "base64", "hex", "large",
    "events",
]  # fmt: skip


def test_a_value_that_a_server_sends_back_is_masked(reach: Reach, token: Path, kept: Path) -> None:
    import base64

    requests = [
        [ECHO, request(f"GET /{how}", ECHO, AUTHORIZED, "Accept-Encoding: gzip"), [], 0] for how in ECHOES
    ]
    outside = control(reach, requests)
    forms = [VALUE, base64.b64encode(f"x{VALUE}".encode()).decode()[4:-4], VALUE.encode().hex()]
    plain = dict(zip(ECHOES, outside, strict=True))
    for how in ("plain", "slow-chunks", "header", "base64", "hex", "large"):
        assert any(form in plain[how] for form in forms) or how == "slow-chunks", plain[how]
    found = attack(reach, token, requests)
    for how, answer in zip(ECHOES, found.verdict, strict=True):
        assert answer.startswith("HTTP/1.1 200"), (how, answer[:200])
        assert not any(form in answer for form in forms), how
        joined = answer.replace("\r\n", "")
        assert "*" * 8 in joined or how in ("chunks", "gzip-chunks", "slow-chunks", "events"), how
        for at in range(len(VALUE) - 8):
            assert VALUE[at : at + 8] not in answer, how
    assert {one["reason"] for one in found.decisions("secret", name=ECHO)} == {"", "echoed"}


#: Where the same server answers too: without TLS, at other ports, by another name.
DOORS = [(BOUND, 443), (BOUND, 80), (BOUND, 8080), (BOUND, 8443), (OTHER, 443), (OTHER, 80)]
TOKEN = "ghp_Real5f2d8A91c7E34b60"


def test_a_value_does_not_come_back_through_another_door(reach: Reach, token: Path, tmp_path: Path) -> None:
    """A header's name is in small letters when the program gets it, whatever the server wrote."""
    token.write_text(TOKEN)
    stored = tmp_path / "stored"
    stored.touch()
    for host in (BOUND, OTHER):
        reach.internet.handle(host, "support.secret_servers:remember", file=str(stored))
    requests: list[list[Any]] = [[BOUND, request("GET /", BOUND, AUTHORIZED), [], 0]]
    for host, port in DOORS:
        named = host if port in (80, 443) else f"{host}:{port}"
        requests += [[host, request(f"GET /{how}", named), [], 0, port] for how in ("plain", "name", "gzip")]
    first, *outside = reach.outside("placeholder", requests, TOKEN, str(reach.internet.bundle))
    assert "stored" in first and all(TOKEN in one for one in outside if "gzip" not in one), outside
    stored.write_text("")
    net = [
        "* https://*.good.example/**", f"* http://{BOUND}/**", f"* http://{BOUND}:8080/**",
        f"* https://{BOUND}:8443/**", f"{OTHER}:80",
    ]  # fmt: skip
    found = reach.inside(
        "placeholder", requests, net=net,
        secrets={"API_KEY": {"from_file": str(token), "hosts": [BOUND]}},
        net_roots=str(reach.internet.bundle),
    )  # fmt: skip
    assert stored.read_text() == TOKEN
    for asked, answer in zip(requests[1:], found.verdict[1:], strict=True):
        assert answer.startswith("HTTP/1.1 200") and "*" * len(TOKEN) in answer, (asked, answer)
        assert TOKEN.lower() not in answer.lower(), asked
    echoed = {(one["name"], one["port"]) for one in found.decisions("secret", reason="echoed")}
    assert echoed == set(DOORS)


#: In the supervisor: tries to open doors of a host with a secret, then lets a program knock at two hosts.
OPEN_DOORS = """
asked, refused = [], []
def on_ask(question):
    asked.append(question.target)
    return "once"
with stockade.Sandbox(stockade.Policy(**POLICY), on_ask=on_ask) as box:
    for rule in RULES:
        for change in (box.net.allow, lambda rule: box.net.replace(rule, *POLICY["net"])):
            try:
                change(rule)
            except stockade.PolicyError as error:
                refused.append(error.message)
    box.net.allow(OPENED)
    answer = [box.run(WORDS).stdout.decode().split(), asked, refused]
"""
KNOCK = """
import socket, sys
for host in sys.argv[1:]:
    try:
        end = socket.create_connection((host, 80), 10)
        end.sendall(b"GET / HTTP/1.1\\r\\nHost: " + host.encode() + b"\\r\\nConnection: close\\r\\n\\r\\n")
        print(end.recv(8).decode())
    except OSError as error:
        print(type(error).__name__)
"""


def test_no_rule_of_a_living_sandbox_opens_a_door_that_is_not_searched(
    reach: Reach, token: Path, kept: Path
) -> None:
    """Neither by a call nor by an answer to a question; the control is a host without a secret."""
    rules = [f"{BOUND}:80", f"tcp://{BOUND}:80", "*.good.example:80", "*:80"]
    policy = {
        "net": ["ask", f"* https://{BOUND}/**"], "net_roots": str(reach.internet.bundle),
        "secrets": {"API_KEY": {"from_file": str(token), "hosts": [BOUND]}},
    }  # fmt: skip
    words = ["/usr/bin/python3", "-c", KNOCK, BOUND, OTHER, ECHO]
    got, asked, refused = reach.supervisor.do(
        f"POLICY, RULES, WORDS, OPENED = {policy!r}, {rules!r}, {words!r}, {OTHER + ':80'!r}\n{OPEN_DOORS}"
    )
    assert len(refused) == 8 and all(f"{BOUND} gets secrets.API_KEY" in one for one in refused), refused
    assert got == ["ConnectionResetError", "HTTP/1.1", "HTTP/1.1"]
    assert asked == [f"{ECHO}:80"]


def test_an_answer_that_cannot_be_searched_is_refused(reach: Reach, token: Path, kept: Path) -> None:
    requests = [[ECHO, request(f"GET /{how}", ECHO, AUTHORIZED), [], 0] for how in ("unknown", "bomb")]
    assert all(one.startswith("HTTP/1.1 200") for one in control(reach, requests))
    unknown, bomb = attack(reach, token, requests).verdict
    assert unknown.startswith("HTTP/1.1 502") and VALUE not in unknown
    # The head was on its way when the bomb went off.
    assert not bomb.endswith("\r\n0\r\n\r\n")


def test_a_value_cannot_be_had_in_two_answers(reach: Reach, token: Path, kept: Path) -> None:
    """With ranges, each answer would have one half of it."""
    half = request("GET /plain", BOUND, AUTHORIZED, "Range: bytes=0-20")
    attack(reach, token, [[BOUND, half, [], 0]])
    assert "range" not in json.loads(arrived(kept)[0])["headers"]


def test_nothing_inside_has_the_value_or_the_key_of_the_authority(
    reach: Reach, token: Path, kept: Path
) -> None:
    secret = {"from_file": str(token), "hosts": [BOUND], "inside": "both"}
    halves = VALUE[:9], VALUE[9:]
    assert reach.outside("value_hunt", *halves, str(token.parent)) == [str(token)]
    told = reach.inside("value_hunt", *halves, net=[], env={"TOLD": VALUE}).verdict
    assert told[0] == "environ" and told[-1].startswith("/proc/"), "it finds what is there"
    found = reach.inside("value_hunt", *halves, net=NET, secrets={"API_KEY": secret})
    assert found.verdict == []


@pytest.mark.parametrize("words", [("run", "--", "true"), ("plan", "--", "true")])
def test_a_project_that_nobody_trusts_runs_no_command_for_a_secret(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    project, proof = tmp_path / "project", tmp_path / "proof"
    project.mkdir()
    (project / "stockade.toml").write_text(
        f'net = ["* https://{BOUND}/**"]\n[secrets.KEY]\nfrom_command = ["touch", "{proof}"]\n'
        f'hosts = ["{BOUND}"]\n'
    )
    subprocess.run(["touch", str(proof)], check=True)
    assert proof.exists()  # the control: the command works
    proof.unlink()
    done = subprocess.run([STOCKADE, *words], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "secrets.KEY" in done.stderr, done.stderr
    assert not proof.exists()


def test_a_file_that_the_program_can_read_or_lead_elsewhere_is_no_source(
    reach: Reach, tmp_path: Path
) -> None:
    """The control: the program reads it if the policy hides nothing and names no secret."""
    project, private = tmp_path / "project", tmp_path / "private"
    project.mkdir()
    private.mkdir()
    (project / "token").write_text(VALUE)
    (private / "token").write_text(VALUE)
    (project / "link").symlink_to(private)
    (tmp_path / "way").symlink_to(project / "link")
    seen = reach.supervisor.run(["cat", str(project / "token")], [], workspace=str(project))
    assert seen["stdout"] == VALUE
    for source in (project / "token", project / "link" / "token", tmp_path / "way" / "token"):
        secret = {"from_file": str(source), "hosts": [BOUND]}
        with pytest.raises(AssertionError, match="the program can read this file"):
            reach.supervisor.run(["true"], NET, secrets={"API_KEY": secret}, workspace=str(project))


def test_a_command_that_prints_a_value_finds_nothing_that_a_program_wrote(
    reach: Reach, tmp_path: Path
) -> None:
    """A directory in which programs write is where many a command looks for its modules or settings."""
    own, workspace = tmp_path / "own", tmp_path / "workspace"
    for place in (own, workspace):
        place.mkdir(mode=0o755)
    (own / "keys.py").write_text(f"print({VALUE!r})")
    planted, done = f"open({str(tmp_path / 'done')!r}, 'x').close(); print('{VALUE}')", tmp_path / "done"
    command = ["env", f"PYTHONPATH={own}", sys.executable, "-m", "keys"]
    (tmp_path / "keys.py").write_text(planted)
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert done.exists()
    done.unlink()
    policy = {
        "net": NET, "net_roots": str(reach.internet.bundle),
        "workspace": {"path": str(workspace), "mode": "rw"}, "unprotect": [".envrc", ".vscode", ".claude"],
        "secrets": {"API_KEY": {"from_command": command, "hosts": [BOUND]}},
    }  # fmt: skip
    plant = ["sh", "-c", 'printf %s "$1" > keys.py', "sh", planted]
    found = reach.supervisor.do(
        f"import os\nos.chdir({str(workspace)!r})\n"
        f"with stockade.Sandbox(stockade.Policy(**{policy!r})) as box:\n"
        f"    answer = box.run({plant!r}).exit_code\n"
        "    box.secrets.refresh()\n"
        "os.chdir('/')\n"
    )
    assert found == 0 and (workspace / "keys.py").read_text() == planted
    assert not done.exists()
