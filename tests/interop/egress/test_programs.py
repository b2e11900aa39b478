"""Programs as people use them reach what the rules allow, and know nothing of the walls.

Each runs first without Stockade, as a control, then behind rules that name its
hosts and nothing more. No program is told of a proxy. What arrives at the
servers of the small internet says where it went.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from interop.egress.conftest import GIT
from support.internet_web import big_hash
from support.means import need, need_program
from support.network import Internet

API = "api.good.example:443"
BIG = int(os.environ.get("STOCKADE_BIG_DOWNLOAD", "64"))


def refused(internet: Internet, argv: Sequence[str], rules: Sequence[str], *options: str) -> dict[str, Any]:
    """Run a command that works without Stockade; behind the rules it fails and leaves no trace outside."""
    control = internet.outside(argv)
    assert control.returncode == 0, (control.stdout, control.stderr)
    internet.clear()
    begun = time.monotonic()
    result = internet.run(argv, rules, *options)
    assert result["exit_code"] not in (0, 125), result
    assert time.monotonic() - begun < 9, "refused at once, not after a timeout"
    assert internet.events() == [], "no packet left"
    return result


def test_curl_reaches_the_host_of_its_rule(do: Any) -> None:
    need_program("curl")
    assert json.loads(do(["curl", "-sS", "https://api.good.example/x"], [API]))["path"] == "/x"


def test_curl_speaks_plain_http_and_keeps_the_connection(do: Any) -> None:
    url = "http://www.good.example"
    out = do(["curl", "-sS", f"{url}/one", f"{url}/two"], ["www.good.example:80"])
    assert [json.loads(line)["path"] for line in out.splitlines()] == ["/one", "/two"]


def test_curl_uses_the_family_that_it_wants(do: Any, internet: Internet) -> None:
    need(internet.ipv6, "this kernel has no IPv6")
    out = do("for family in -4 -6; do curl -sS $family https://api.good.example/; done", [API])
    assert [json.loads(line)["tls"] for line in out.splitlines()] == [True, True]


def test_curl_speaks_http_2(do: Any) -> None:
    out = do(["curl", "-sS", "--http2", "https://h2.good.example/"], ["h2.good.example:443"])
    assert json.loads(out)["version"] == "2"


def test_an_upload_arrives_whole(do: Any) -> None:
    script = "head -c 3000000 /dev/zero | curl -sS --data-binary @- https://api.good.example/echo | sha256sum"
    assert do(script, [API]).split()[0] == hashlib.sha256(bytes(3000000)).hexdigest()


def test_a_large_download_arrives_whole(do: Any) -> None:
    out = do(f"curl -sS 'https://api.good.example/big?mb={BIG}' | sha256sum", [API])
    assert out.split()[0] == big_hash(BIG)


def test_curl_does_not_reach_another_host(internet: Internet) -> None:
    result = refused(internet, ["curl", "-sS", "https://evil.example/"], [API])
    assert result["exit_code"] == 6, "the name does not exist"


def test_curl_does_not_reach_an_address_or_another_port(internet: Internet) -> None:
    result = refused(internet, ["curl", "-sSk", "https://11.0.0.66/"], [API])
    assert result["exit_code"] in (7, 35, 56), result["stderr"]
    code = "import socket; socket.create_connection(('api.good.example', 8443))"
    result = refused(internet, [sys.executable, "-c", code], [API])
    assert "ConnectionRefusedError" in result["stderr"], result["stderr"]


def test_a_redirect_leads_nowhere_else(internet: Internet) -> None:
    url = "https://api.good.example/redirect?to=https://evil.example/"
    assert internet.outside(["curl", "-sSL", url]).returncode == 0
    internet.clear()
    assert internet.run(["curl", "-sSL", url], [API])["exit_code"] == 6
    assert internet.asked() <= {"api.good.example"} and ("11.0.0.66", 443) not in internet.reached()


def test_wget_downloads(do: Any) -> None:
    need_program("wget")
    out = do(["wget", "-qO-", "https://api.good.example/by-wget"], [API])
    assert json.loads(out)["path"] == "/by-wget"


def test_pip_installs_from_an_index(do: Any, packages: None) -> None:
    code = (
        "import subprocess, sys\n"
        "pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '-q', 'install']\n"
        "source = ['--no-cache-dir', '--index-url', 'https://pypi.good.example/simple/']\n"
        "subprocess.run([*pip, *source, '--target', 'site', 'first'], check=True)\n"
        "sys.path.insert(0, 'site')\n"
        "import first, second\n"
        "print(first.answer, second.answer)"
    )
    assert do([sys.executable, "-c", code], ["pypi.good.example:443"]) == "first second\n"


def test_npm_installs_from_a_registry(do: Any, registry: None) -> None:
    need_program("npm")
    script = (
        "npm install --silent --no-audit --no-fund --registry https://npm.good.example/ thing; "
        "node -e 'console.log(require(\"thing\"))'"
    )
    assert do(script, ["npm.good.example:443"]) == "the thing\n"


def test_git_clones_over_https(do: Any, internet: Internet, repository: Path) -> None:
    internet.publish("git.good.example", repository.parent)
    script = "git clone -q https://git.good.example/thing.git; cat thing/file"
    assert do(script, ["git.good.example:443"], env=GIT) == "from far away\n"


@pytest.fixture
def ssh_server(internet: Internet, tmp_path: Path) -> Iterator[Path]:
    """An SSH server of the user's own on port 2222; the path is that of a key that it accepts."""
    need(os.path.exists("/usr/sbin/sshd"), "the program sshd is not installed")
    place = tmp_path / "ssh"
    place.mkdir()
    for name in ("host", "client"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)]
        subprocess.run(make, check=True)
    shutil.copy(place / "client.pub", place / "authorized")
    (place / "config").write_text(
        f"Port 2222\nHostKey {place}/host\nAuthorizedKeysFile {place}/authorized\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n"
    )
    # Debian's sshd wants it if root starts it.
    directory = Path("/run/sshd")
    made = os.geteuid() == 0 and not directory.exists()
    if made:
        directory.mkdir(mode=0o755)
    log = place / "log"
    command = ["/usr/sbin/sshd", "-D", "-f", str(place / "config"), "-E", str(log)]
    try:
        with internet.server(command):
            _until(lambda: log.exists() and "listening" in log.read_text(), "sshd listens")
            yield place / "client"
    finally:
        if made:
            directory.rmdir()


def test_git_clones_over_ssh(do: Any, ssh_server: Path, repository: Path) -> None:
    options = "-F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    script = f"git clone -q ssh://{user}@ssh.good.example:2222{repository}; cat thing/file"
    env = {**GIT, "GIT_SSH_COMMAND": f"ssh {options} -i {ssh_server}"}
    out = do(script, ["tcp://ssh.good.example:2222"], f"--read={ssh_server}", env=env)
    assert out == "from far away\n"


def _until(true: Any, what: str) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)


CLIENTS = {
    "requests": "import requests; print(requests.get('https://api.good.example/x', timeout=20).text)",
    "httpx": "import httpx; print(httpx.get('https://api.good.example/x').text)",
    "aiohttp": (
        "import aiohttp, asyncio\n"
        "async def main():\n"
        "    async with aiohttp.ClientSession() as session:\n"
        "        async with session.get('https://api.good.example/x') as response:\n"
        "            print(await response.text())\n"
        "asyncio.run(main())"
    ),
    "urllib": "import urllib.request as r; print(r.urlopen('https://api.good.example/x').read().decode())",
}


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_in_python_reach_it(do: Any, name: str) -> None:
    assert json.loads(do([sys.executable, "-c", CLIENTS[name]], [API]))["path"] == "/x"


def test_httpx_speaks_http_2(do: Any) -> None:
    code = (
        "import httpx\n"
        "with httpx.Client(http2=True) as client:\n"
        "    print([client.get('https://h2.good.example/').http_version for _ in range(3)])"
    )
    assert do([sys.executable, "-c", code], ["h2.good.example:443"]).strip() == str(["HTTP/2"] * 3)


WEBSOCKET = """
import aiohttp, asyncio, sys

async def main():
    async with aiohttp.ClientSession() as session, session.ws_connect(sys.argv[1]) as socket:
        print(await socket.receive_str())
        for number in range(3):
            await socket.send_str(f"message {number}")
            print(await socket.receive_str())

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("url", "rule"),
    [("wss://api.good.example/", API), ("ws://www.good.example/", "www.good.example:80")],
)
def test_a_websocket_stays_open_both_ways(do: Any, url: str, rule: str) -> None:
    out = do([sys.executable, "-c", WEBSOCKET, url], [rule])
    assert out.splitlines() == ["welcome", "message 0", "message 1", "message 2"]


def test_node_fetches(do: Any) -> None:
    need_program("node")
    code = "fetch('https://api.good.example/by-node').then(r => r.text()).then(t => console.log(t))"
    assert json.loads(do(["node", "-e", code], [API]))["path"] == "/by-node"


def test_a_go_program_with_its_own_resolver_reaches_it(do: Any, internet: Internet) -> None:
    need_program("hey")
    command = ["hey", "-n", "20", "-c", "4", "https://api.good.example/"]
    out = do(command, [API], env={"GODEBUG": "netdns=go"})
    assert "[200]\t20 responses" in out, out


def test_a_static_wget_reaches_it(do: Any) -> None:
    need_program("busybox")
    out = do(["busybox", "wget", "-qO-", "http://www.good.example/static"], ["www.good.example:80"])
    assert json.loads(out)["path"] == "/static"


def test_200_connections_at_once_are_served(do: Any) -> None:
    need_program("hey")
    command = ["hey", "-n", "1000", "-c", "200", "-disable-keepalive", "http://www.good.example/"]
    assert "[200]\t1000 responses" in do(command, ["www.good.example:80"])


PAGE = """<!doctype html><body><script>
const note = text => document.body.append(text);
fetch("https://api.good.example/from-the-page").then(answer => answer.json()).then(found => note(found.path));
fetch("https://evil.example/").then(() => note("reached"), () => note("refused"));
</script>"""


def test_a_browser_loads_a_page_and_what_the_page_asks_for(internet: Internet, tmp_path: Path) -> None:
    need_program("chromium-headless-shell")
    (tmp_path / "index.html").write_text(PAGE)
    internet.publish("web.good.example", tmp_path)
    command = ["chromium-headless-shell", "--no-sandbox", "--disable-gpu", "--ignore-certificate-errors"]
    command += ["--virtual-time-budget=5000", "--dump-dom", "https://web.good.example/"]
    control = internet.outside(command, env={"HOME": str(tmp_path)}).stdout
    assert "/from-the-page" in control and "reached" in control.partition("</script>")[2], control
    internet.clear()
    result = internet.run(command, ["web.good.example:443", API])
    shown = result["stdout"].partition("</script>")[2]
    assert "/from-the-page" in shown and "refused" in shown and "reached" not in shown, result["stderr"]
    assert internet.asked() == {"web.good.example", "api.good.example"}


@pytest.fixture(scope="module")
def own_resolver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static program that asks a DNS server of its own choice."""
    need_program("gcc")
    program = tmp_path_factory.mktemp("program") / "own_resolver"
    source = Path(__file__).with_name("programs") / "own_resolver.c"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-static", "-o", program, source], check=True)
    return program


@pytest.mark.parametrize("transport", ["udp", "tcp"])
def test_a_static_program_with_a_dns_server_of_its_own_reaches_it(
    do: Any, internet: Internet, own_resolver: Path, transport: str
) -> None:
    argv = [str(own_resolver), "8.8.8.8", transport, "www.good.example", "80"]
    assert "www.good.example" in do(argv, ["www.good.example:80"], f"--read={own_resolver}")
    assert not internet.events("dns", address="8.8.8.8"), "that server was never asked"
    argv[3] = "evil.example"
    result = refused(internet, argv, ["www.good.example:80"], f"--read={own_resolver}")
    assert result["exit_code"] == 3, "the name does not exist"


@pytest.fixture(scope="module")
def database(shared_internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A PostgreSQL that wants TLS, at db.good.example. It does not run as root."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    need(bool(found), "PostgreSQL is not installed")
    programs = found[-1].parent
    place = tmp_path_factory.mktemp("database")
    become: list[str] = []
    if os.geteuid() == 0:
        become = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]
        place = Path(
            subprocess.run(
                [*become, "mktemp", "-d", "/var/tmp/stockade-database.XXXXXX"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
        )
    try:
        data = place / "data"
        make = [str(programs / "initdb"), "--no-sync", "-U", "me", "--auth=trust", "-D", str(data)]
        subprocess.run([*become, *make], cwd="/", stdout=subprocess.DEVNULL, check=True)
        for source, name in zip(shared_internet.issue("db.good.example"), ("crt", "key"), strict=True):
            target = data / f"server.{name}"
            shutil.copyfile(source, target)
            target.chmod(0o600)
            shutil.chown(target, data.owner(), data.group())
        (data / "pg_hba.conf").write_text("hostssl all all all trust\n")
        settings = {
            "ssl": "on",
            "fsync": "off",
            "unix_socket_directories": "",
            "listen_addresses": "11.0.0.33",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        server = [*become, str(programs / "postgres"), "-D", str(data), *options]
        quick = signal.SIGQUIT
        with shared_internet.server(server, stop=quick, cwd=Path("/"), stderr=subprocess.DEVNULL):
            ready = ["pg_isready", "-q", "-h", "11.0.0.33"]
            _until(lambda: shared_internet.outside(ready).returncode == 0, "the database is there")
            yield
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("rule", ["tcp://db.good.example:5432", "db.good.example:5432"])
def test_psql_upgrades_to_tls_and_queries(do: Any, internet: Internet, database: None, rule: str) -> None:
    trust = f"sslmode=verify-full sslrootcert={internet.bundle}"
    argv = ["psql", f"host=db.good.example user=me dbname=postgres {trust}", "-tAc"]
    query = (
        "select count(*), ssl from generate_series(1, 100000), pg_stat_ssl "
        "where pid = pg_backend_pid() group by ssl"
    )
    assert do([*argv, query], [rule], f"--read={internet.bundle}") == "100000|t\n"


def test_a_server_that_speaks_first_is_heard(do: Any) -> None:
    code = (
        "import socket; s = socket.create_connection(('greeter.good.example', 2500)); "
        "print(s.recv(99).decode(), end=''); s.sendall(b'QUIT'); print(s.recv(9).decode())"
    )
    out = do([sys.executable, "-c", code], ["tcp://greeter.good.example:2500"])
    assert out.splitlines() == ["220 greeter.good.example ready", "QUIT"]
