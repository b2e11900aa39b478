"""A small internet for one module of tests: the fixture `internet`.

It is a network namespace whose loopback device has public-looking addresses,
with a DNS server, web servers and a certificate authority of its own; and a
mount namespace in which the machine's own files say so. Programs, `stockade`
among them, run in it as if it were the machine's network. It needs no
privileges: an ordinary user owns it through a user namespace, in which that
user stays who they are and has no capabilities.

    internet.run(["curl", "-sS", "https://api.good.example/"], net=["api.good.example:443"])

runs `stockade run` there and returns its result; `internet.outside([...])`
runs the same command without Stockade, as a control; `internet.python(code)`
runs Python that uses the library. `internet.events()` says what arrived where.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.cli import STOCKADE
from support.means import need
from support.paths import ROOT

PATIENCE = 60.0


class Internet:
    """The small internet, as tests use it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        launch = ["unshare", "--net", "--mount"]
        enter = ["nsenter", "--net", "--mount"]
        if os.geteuid():
            launch += ["--user", "--map-current-user", "--keep-caps"]
            enter += ["--user", "--preserve-credentials"]
        self._process = subprocess.Popen(
            [*launch, sys.executable, "-m", "support.internet_process", str(directory)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._enter = [*enter, f"--target={self._process.pid}"]
        try:
            about = self._answer()
        except BaseException:
            self.close()
            raise
        #: Whether this kernel has IPv6; without it the names have IPv4 addresses only.
        self.ipv6: bool = about["ipv6"]
        #: The authority's certificate, and all that a program on this machine trusts.
        self.certificate = Path(about["certificate"])
        self.bundle = Path(about["bundle"])

    def close(self) -> None:
        """End it; with its processes the namespaces go."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=10)

    def command(self, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """Return the argv that runs another one in there, for tests that start it themselves."""
        return [*self._enter, "--", "env", "-C", str(cwd or self.directory), *argv]

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program in there, without Stockade, in a process group of its own."""
        environment = {**os.environ, **self.trust, **(env or {})}
        return subprocess.Popen(self.command(argv, cwd), env=environment, **{"process_group": 0, **more})

    @contextlib.contextmanager
    def server(
        self, argv: Sequence[str], *, stop: signal.Signals = signal.SIGTERM, **more: Any
    ) -> Iterator[subprocess.Popen[Any]]:
        """Run a server in there for as long as the context lasts; `stop` is the signal that ends it."""
        process = self.popen(argv, **more)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, stop)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def outside(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str = "",
        timeout: float = PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in there without Stockade and return what it printed."""
        process = self.popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def stockade(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run the `stockade` command in there."""
        return self.outside([STOCKADE, *arguments], **more)

    def run(
        self,
        argv: Sequence[str],
        net: Sequence[str] | str = (),
        *options: str,
        cwd: Path | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Run a command with `stockade run` and these rules; return the result as `--json` prints it.

        `options` are further ones of `stockade run`. Without `cwd` it works in an empty directory.
        """
        rules = [net] if isinstance(net, str) else list(net)
        words = ["run", "--json", "--discard", *(f"--net={rule}" for rule in rules), *options, "--", *argv]
        with self._place(cwd) as place:
            done = self.stockade(*words, cwd=place, **more)
        try:
            result: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"no result: {done.stdout}{done.stderr}") from None
        return result

    def python(self, code: str, *, cwd: Path | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run Python code that can import `stockade` and the tests' `support`."""
        env = {"PYTHONPATH": str(ROOT / "tests"), **more.pop("env", {})}
        with self._place(cwd) as place:
            return self.outside([sys.executable, "-c", code], cwd=place, env=env, **more)

    @property
    def trust(self) -> dict[str, str]:
        """The variables by which programs with certificates of their own trust this internet's."""
        names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
        return dict.fromkeys(names, str(self.bundle))

    def events(self, kind: str = "", **about: Any) -> list[dict[str, Any]]:
        """What arrived since the test began, of this kind and with these values.

        The kinds are "dns", "connection", "datagram" and "request".
        """
        wanted = {**({"kind": kind} if kind else {}), **about}
        return [e for e in self._do("events") if all(e.get(key) == value for key, value in wanted.items())]

    def asked(self) -> set[str]:
        """The names for which a question arrived at a DNS server."""
        return {event["name"] for event in self.events("dns")}

    def reached(self) -> set[tuple[str, int]]:
        """The addresses and ports at which a connection arrived."""
        return {(event["address"], event["port"]) for event in self.events("connection")}

    def clear(self) -> None:
        """Forget what arrived."""
        self._do("clear")

    def reset(self) -> None:
        """Forget what arrived, and what a test has changed in the zone and the machine's files."""
        self._do("reset")

    def zone(self, **records: dict[str, Any]) -> None:
        """Change names of the zone: `zone(**{"name.example": {"A": ["11.0.0.10"], "ttl": 0}})`."""
        self._do("zone", records=records)

    def write_etc(self, name: str, text: str) -> None:
        """Replace the content of the machine's resolv.conf, hosts or nsswitch.conf."""
        self._do("write", name=name, text=text)

    def publish(self, name: str, directory: Path) -> None:
        """Serve the files of a directory under a name of the zone, over HTTP and HTTPS."""
        self._do("publish", name=name, directory=str(directory))

    def handle(self, name: str, function: str, **options: Any) -> None:
        """Let `module:function` answer the requests for a name; see `internet_web.Request`."""
        self._do("handle", name=name, function=function, options=options)

    def serve(self, port: int, behaviour: str) -> None:
        """Serve one more port on every address: "echo", "greet" or "silent"."""
        self._do("serve", port=port, behaviour=behaviour)

    def issue(self, name: str) -> tuple[Path, Path]:
        """Make a certificate for a name; return its file and that of its key."""
        file, key = self._do("issue", name=name)
        return Path(file), Path(key)

    @contextlib.contextmanager
    def _place(self, cwd: Path | None) -> Iterator[Path]:
        if cwd is not None:
            yield cwd
            return
        with tempfile.TemporaryDirectory(dir=self.directory) as place:
            yield Path(place)

    def _do(self, action: str, **about: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, **about}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the small internet ended with exit code {self._process.wait()}"
        return json.loads(line)["answer"]


@contextlib.contextmanager
def small_internet(directory: Path) -> Iterator[Internet]:
    """Make a small internet whose files lie in a directory, and end it."""
    for program in ("unshare", "nsenter", "ip"):
        need(shutil.which(program) is not None, f"the program {program} is not installed")
    need(_namespaces_work(), "this user may not make namespaces")
    internet = Internet(directory)
    try:
        yield internet
    finally:
        internet.close()


def _namespaces_work() -> bool:
    user = ["--user", "--map-current-user", "--keep-caps"] if os.geteuid() else []
    command = ["unshare", "--net", "--mount", *user, "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
