"""A hostile command is learned from: whatever it does, no secret gets into the policy or into a run."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from attacks.arena import ATTACKS, PYTHON
from stockade.policy.net_addresses import forbidden_address
from stockade.policy.net_rules import parse_rule
from support.cli import stockade_command
from support.network import Internet
from support.screens import STOCKADE, Terminal

SECRET = "BEGIN PRIVATE KEY"


class Ground:
    """A home with secrets, a hostile repository, and a directory with a secret among harmless files."""

    def __init__(self, top: Path) -> None:
        self.home, self.data, self.writable = top / "home", top / "data", top / "writable"
        self.workspace = top / "workspace"
        for directory in (self.home / ".ssh", self.home / ".config" / "tool", self.home / "notes"):
            directory.mkdir(parents=True)
        for directory in (self.data, self.writable, self.workspace):
            directory.mkdir(exist_ok=True)
        secrets = [
            self.home / ".ssh" / "id_rsa",
            self.home / ".config" / "tool" / "token",
            self.data / ".env",
            self.data / "private",
        ]
        for path in secrets:
            path.write_text(SECRET)
        (self.data / "private").chmod(0o600)
        (self.data / "innocent").symlink_to(self.home / ".ssh" / "id_rsa")
        (self.workspace / "docs").symlink_to(self.home / ".ssh")
        for number in range(40):
            (self.home / f"file-{number}").write_text("harmless")
            (self.data / f"file-{number}").write_text("harmless")
        (self.data / 'x"]\nnet = "open"\nread = ["').mkdir()
        self.policy = top / "policy.toml"
        program = self.workspace / "attack.py"
        program.write_text((ATTACKS / "learned.py").read_text())
        places = (self.home, self.workspace, self.data, self.writable)
        self.command = [PYTHON, str(program), *map(str, places)]

    def stockade(self, *words: str) -> subprocess.CompletedProcess[str]:
        return stockade_command(*words, cwd=self.workspace, env={"HOME": str(self.home)})


@pytest.fixture
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("ground"))


def pem(kind: str) -> str:
    return f"-----BEGIN {kind}-----\n{'MIIEvQIBADANBgkqhkiG9w0B' * 3}\n-----END {kind}-----\n"


#: World-readable files: three with a secret in them, two without.
FILES = {
    "server.pem": pem("PRIVATE KEY"),
    "token.txt": "8Zk2mQ7vT1xLr9Wc4Hs6\n",
    "wg0.conf": f"[Interface]\nPrivateKey = {'aB3' * 14}b=\nAddress = 10.0.0.2/32\n",
    "site.crt": pem("CERTIFICATE"),
    "numbers": "1 2 3\n",
}
VARIABLES = {
    "GRADLE_OPTS": "-Xmx1g -PnexusPass=hunter2",
    "PIP_FIND_LINKS": "https://dl.example/t/ab12cd34/simple",
    "PIP_TIMEOUT": "30",
}


class PlainGround:
    """Secrets in files that everybody may read, with harmless names in a harmless place, and in variables."""

    CODE = """
import json, os, sys
found = {}
for name in json.loads(sys.argv[2]):
    try:
        found[name] = open(os.path.join(sys.argv[1], name)).read()
    except OSError:
        found[name] = None
try:
    os.listdir(sys.argv[1])
except OSError:
    pass
print(json.dumps({**found, **os.environ}))
"""

    def __init__(self, top: Path) -> None:
        self.data, self.workspace, self.home = top / "data", top / "workspace", top / "home"
        for directory in (self.data, self.workspace, self.home):
            directory.mkdir()
        for name, text in FILES.items():
            (self.data / name).write_text(text)
            (self.data / name).chmod(0o644)
        # Programs are recognised by their names: Python counts as pip, and a script as Gradle.
        (self.workspace / "gradle").write_text(f"#!{PYTHON}\n{self.CODE}")
        (self.workspace / "gradle").chmod(0o755)
        self.command = [str(self.workspace / "gradle"), str(self.data), json.dumps([*FILES])]
        self.environment = {"HOME": str(self.home), **VARIABLES}


@pytest.fixture
def plain_ground(tmp_path_factory: pytest.TempPathFactory) -> PlainGround:
    return PlainGround(tmp_path_factory.mktemp("ground"))


def test_a_secret_that_everybody_may_read_is_found_by_its_content(plain_ground: PlainGround) -> None:
    ground = plain_ground
    learned = stockade_command(
        "learn", "--json", "--", *ground.command, cwd=ground.workspace, env=ground.environment
    )
    found: dict[str, Any] = json.loads(learned.stdout)
    granted = {os.path.basename(path) for path in found["policy"]["read"]}
    assert granted == {"site.crt", "numbers"}, "neither the secrets, nor the directory around them"
    assert VARIABLES.keys() & {*found["policy"]["pass_env"]} == {"PIP_TIMEOUT"}
    options = {one["option"] for one in found["questions"]}
    assert options >= {f"--read {ground.data / name}" for name in ("server.pem", "token.txt", "wg0.conf")}
    assert options >= {"--pass-env GRADLE_OPTS", "--pass-env PIP_FIND_LINKS"}
    assert "hunter2" not in learned.stdout + learned.stderr, "no secret is repeated"
    environment = {**os.environ, **ground.environment}
    outside = subprocess.run(
        ground.command, cwd=ground.workspace, env=environment, capture_output=True, check=True
    )
    seen = json.loads(outside.stdout)
    assert seen.items() >= {**FILES, **VARIABLES}.items(), "without walls it has them all"


def test_at_a_terminal_the_user_is_asked_about_each_file_and_no_is_the_default(
    plain_ground: PlainGround, tmp_path: Path
) -> None:
    ground = plain_ground
    policy = tmp_path / "policy.toml"
    files = json.dumps(["token.txt", "server.pem"])
    words = [STOCKADE, "learn", "-o", str(policy), "--", "./gradle", str(ground.data), files]
    with Terminal(
        words, ground.workspace, environment={"HOME": str(ground.home)}, size=(60, 200)
    ) as terminal:
        terminal.until("token.txt: it has a token in it")
        terminal.type("y\n")
        terminal.until("server.pem: it has a private key in it")
        terminal.type("\n")
        terminal.until("wrote ")
    assert tomllib.loads(policy.read_text())["read"] == [str(ground.data / "token.txt")]


def test_no_secret_is_learned_or_seen(ground: Ground) -> None:
    writable = f"--write={ground.writable}"
    learned = ground.stockade("learn", "-o", str(ground.policy), writable, "--", *ground.command)
    assert learned.returncode == 0, learned.stderr
    assert SECRET not in learned.stdout, "in no run was a secret to be seen"
    table = tomllib.loads(ground.policy.read_text())
    assert "net" not in table and "toolchain" not in table
    assert os.path.join(ground.data, "file-7") in table["read"], "what is harmless is learned"
    ran = ground.stockade("run", "-q", "--discard", "-p", str(ground.policy), "--", *ground.command)
    verdict = json.loads(ran.stdout)
    assert SECRET not in ran.stdout and "itself" in verdict, verdict
    for name in (".ssh/id_rsa", ".env", "private"):
        assert name in learned.stderr + ground.policy.read_text(), "the user is asked about each"
    outside = subprocess.run(ground.command, capture_output=True, text=True, check=True)
    assert {*json.loads(outside.stdout).values()} == {SECRET}, "without walls it reads them all"


class Dialer:
    """What a hostile command wants of the network."""

    CODE = """
import socket, ssl
for host in ("metadata.evil.example", "private.evil.example", "local.evil.example", "evil.example"):
    try:
        with socket.create_connection((host, 443), 1) as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except OSError:
        pass
for address in ("10.0.0.5", "169.254.169.254", "127.0.0.1", "100.100.100.200"):
    try:
        socket.create_connection((address, 80), 1).close()
    except OSError:
        pass
"""


def test_no_address_of_the_own_network_is_learned(
    internet: Internet, tmp_path: Path, workspace: Path
) -> None:
    policy = tmp_path / "policy.toml"
    words = ["learn", "--json", "-o", str(policy), "--", PYTHON, "-c", Dialer.CODE]
    done = internet.stockade(*words, cwd=workspace)
    found: dict[str, Any] = json.loads(done.stdout)
    rules = [parse_rule(rule) for rule in found["policy"].get("net", ())]
    assert {rule.name for rule in rules} == {"evil.example"}
    assert not any(rule.network and forbidden_address(rule.network) for rule in rules)
    assert not {"10.0.0.5", "169.254.169.254", "127.0.0.1"} & {host for host, _ in internet.reached()}
    assert "10.0.0.5:80" in str(found["questions"]) and "169.254.169.254:80" in str(found["questions"])


def test_without_a_network_nothing_leaves_and_hosts_are_questions(
    internet: Internet, tmp_path: Path, workspace: Path
) -> None:
    code = "import socket\ntry: socket.create_connection(('evil.example', 443), 1)\nexcept OSError: pass"
    internet.clear()
    done = internet.stockade("learn", "--json", "--net", "none", "--", PYTHON, "-c", code, cwd=workspace)
    found = json.loads(done.stdout)
    assert "net" not in found["policy"] and "evil.example" in str(found["questions"])
    assert internet.events() == [], "no packet left"
