"""What `net = "open"` passes of the user's environment: certificates and proxies, and never a secret."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade.linux.user import Caller
from stockade.policy import Policy
from stockade.resolve import host_network
from stockade.resolve.host_network import MOST_BYTES, proxy
from stockade.resolve.resolution import resolve
from stockade.resolve.resolved import ResolvedPolicy
from support.certificates import CERTIFICATE, PRIVATE_KEY

Resolve = Callable[..., ResolvedPolicy]


@pytest.fixture
def resolved(tmp_path: Path, stockade_home: Path) -> Iterator[Resolve]:
    """A policy with the host's network, resolved in the given environment."""
    made: list[ResolvedPolicy] = []
    (tmp_path / "home").mkdir()

    def make(environ: dict[str, str], **clauses: Any) -> ResolvedPolicy:
        home = str(tmp_path / "home")
        caller = Caller(os.getuid(), os.getgid(), "me", "us", home, home, environ)
        made.append(resolve(Policy(**({"net": "open"} | clauses)), caller, str(stockade_home)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "corporate.pem"
    path.write_text(f"# the company's own\n{CERTIFICATE}{CERTIFICATE}")
    return path


def warnings(found: ResolvedPolicy) -> str:
    assert found.network is not None
    return "\n".join(found.network.warnings)


@pytest.mark.parametrize("name", host_network.FILES)
def test_a_file_of_certificates_is_shown_read_only_and_named(
    name: str, resolved: Resolve, bundle: Path
) -> None:
    found = resolved({name: str(bundle)})
    assert found.environ[name] == str(bundle)
    assert [(one.path, one.access, one.clause) for one in found.grants] == [
        (str(bundle), "read", f'net = "open", for {name}')
    ]
    assert not warnings(found)


def test_without_the_hosts_network_nothing_is_passed(resolved: Resolve, bundle: Path) -> None:
    found = resolved({"SSL_CERT_FILE": str(bundle), "https_proxy": "http://proxy:3128"}, net=[])
    assert found.grants == () and found.network is None
    assert not {"SSL_CERT_FILE", "https_proxy"} & found.environ.keys()


def test_with_rules_certificates_are_passed_and_proxies_are_not(resolved: Resolve, bundle: Path) -> None:
    environ = {"SSL_CERT_FILE": str(bundle), "https_proxy": "http://proxy:3128", "NO_PROXY": "x"}
    found = resolved(environ, net=["a.example:443"])
    assert [one.clause for one in found.grants] == ['net = ["a.example:443"], for SSL_CERT_FILE']
    assert found.environ["SSL_CERT_FILE"] == str(bundle)
    assert not {"https_proxy", "NO_PROXY"} & found.environ.keys()
    assert found.network is not None
    assert found.network.notes == (
        "https_proxy is not passed: with rules, Stockade itself connects through the proxy",
    )
    assert 'because of net = ["a.example:443"]' in found.network.lines[0]
    by_name = resolved(environ, net=["a.example:443"], pass_env=["https_proxy"])
    assert by_name.environ["https_proxy"] == "http://proxy:3128"


def test_rules_that_only_deny_pass_nothing(resolved: Resolve, bundle: Path) -> None:
    found = resolved({"SSL_CERT_FILE": str(bundle)}, net=["!a.example"])
    assert found.grants == () and found.network is None


def test_what_is_shown_already_needs_no_grant(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    inside = tmp_path / "project/ca.pem"
    inside.write_text(CERTIFICATE)
    environ = {
        "SSL_CERT_FILE": "/usr/share/ca.pem",
        "SSL_CERT_DIR": "/etc/ssl/certs",
        "PIP_CERT": str(inside),
    }
    found = resolved(environ, workspace=str(tmp_path / "project"))
    assert found.grants == ()
    assert {name: found.environ[name] for name in environ} == environ


def test_behind_a_link_it_has_its_real_name(resolved: Resolve, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "link.pem").symlink_to(bundle)
    found = resolved({"SSL_CERT_FILE": str(tmp_path / "link.pem"), "PIP_CERT": str(bundle)})
    assert found.environ["SSL_CERT_FILE"] == found.environ["PIP_CERT"] == str(bundle)
    assert len(found.grants) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (PRIVATE_KEY, "has a private key in it"),
        (CERTIFICATE + PRIVATE_KEY, "has a private key in it"),
        (CERTIFICATE + "x" * MOST_BYTES, "is larger than"),
        (CERTIFICATE + "-----BEGIN PGP MESSAGE-----\n", "is not a file of certificates"),
        ("password = hunter2\n", "is not a file of certificates"),
        ("", "is not a file of certificates"),
    ],
)
def test_a_file_that_is_not_of_certificates_alone_is_not_shown(
    content: str, why: str, resolved: Resolve, bundle: Path
) -> None:
    bundle.write_text(content)
    found = resolved({"SSL_CERT_FILE": str(bundle)})
    assert found.grants == () and "SSL_CERT_FILE" not in found.environ
    assert f"SSL_CERT_FILE is not passed: {bundle} {why}" in warnings(found)


def test_what_is_no_file_is_not_shown(resolved: Resolve, tmp_path: Path, stockade_home: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    stockade_home.mkdir(exist_ok=True)
    (stockade_home / "ca.pem").write_text(CERTIFICATE)
    for value in ("fifo", "directory", "missing"):
        found = resolved({"SSL_CERT_FILE": str(tmp_path / value)})
        assert found.grants == () and "SSL_CERT_FILE is not passed" in warnings(found)
    for value in ("relative.pem", str(stockade_home / "ca.pem"), "/proc/self/environ"):
        found = resolved({"SSL_CERT_FILE": value})
        assert found.grants == () and "SSL_CERT_FILE is not passed" in warnings(found)


def test_a_directory_is_shown_if_it_has_only_certificates(resolved: Resolve, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    certs.mkdir()
    (certs / "a.pem").write_text(CERTIFICATE)
    (certs / "12ab.0").symlink_to("a.pem")
    environ = {"SSL_CERT_DIR": f"/etc/ssl/certs:{certs}"}
    found = resolved(environ)
    assert found.environ["SSL_CERT_DIR"] == environ["SSL_CERT_DIR"]
    assert [grant.path for grant in found.grants] == [str(certs)]
    (certs / "b.key").write_text(PRIVATE_KEY)
    found = resolved(environ)
    assert found.grants == () and "SSL_CERT_DIR" not in found.environ
    assert "'b.key' in it, which has a private key" in warnings(found)


def test_settings_of_pip_and_npm_name_certificates_too(
    resolved: Resolve, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home/.npmrc").write_text(f"//registry/:_authToken=secret\ncafile = {bundle}\n")
    settings = (("NPM_CONFIG_CAFILE", "cafile", ("/nonexistent/npmrc", "~/.npmrc")),)
    monkeypatch.setattr(host_network, "SETTINGS", settings)
    found = resolved({})
    assert found.environ["NPM_CONFIG_CAFILE"] == str(bundle)
    assert [grant.path for grant in found.grants] == [str(bundle)]
    assert "secret" not in str(found.environ)


@pytest.mark.parametrize("name", [*host_network.PROXIES, *host_network.NO_PROXIES])
def test_a_proxy_is_passed(name: str, resolved: Resolve) -> None:
    assert resolved({name: "proxy.example:3128"}).environ[name] == "proxy.example:3128"


@pytest.mark.parametrize(
    ("value", "passed"),
    [
        ("http://proxy.example:3128", "http://proxy.example:3128"),
        ("http://proxy.example:3128/", "http://proxy.example:3128"),
        ("http://me:secret@proxy.example:3128/", "http://proxy.example:3128"),
        ("http://secret@proxy.example", "http://proxy.example"),
        ("me:secret@proxy.example:3128", "proxy.example:3128"),
        ("socks5h://me:s%40cret@[fe80::1]:1080", "socks5h://[fe80::1]:1080"),
    ],
)
def test_a_proxy_loses_its_user_and_password(value: str, passed: str, resolved: Resolve) -> None:
    assert proxy(value) == passed
    found = resolved({"HTTPS_PROXY": value})
    assert found.environ["HTTPS_PROXY"] == passed
    assert found.network is not None and ("@" in value) is bool(found.network.notes)
    assert "secret" not in "\n".join(found.network.lines)


@pytest.mark.parametrize(
    "value",
    [
        "http://me:sec/ret@proxy:3128",
        "http://proxy:3128:me:secret",
        "me:secret",
        "http://me:sec@ret@proxy:3128",
        "http://me:sec#ret@proxy:3128",
        "http://proxy:3128/?token=secret",
        "http://proxy:3128 secret",
        "http://me:secret@",
    ],
)
def test_a_proxy_that_cannot_be_read_for_certain_is_not_passed(value: str, resolved: Resolve) -> None:
    found = resolved({"http_proxy": value})
    assert "http_proxy" not in found.environ
    assert "http_proxy is not passed" in warnings(found)
    assert found.network is not None and "ret" not in "\n".join(found.network.lines)


def test_what_the_policy_says_comes_first(resolved: Resolve, bundle: Path) -> None:
    environ = {"SSL_CERT_FILE": str(bundle), "https_proxy": "http://me:secret@proxy:1", "http_proxy": "x:1"}
    found = resolved(environ, env={"SSL_CERT_FILE": "/own.pem", "http_proxy": ""}, pass_env=["https_proxy"])
    assert found.grants == ()
    assert [found.environ[name] for name in environ] == ["/own.pem", "http://me:secret@proxy:1", ""]


@pytest.mark.parametrize("deny", ["{}/corporate.pem", "{}/*.pem"])
def test_a_denied_file_is_neither_shown_nor_named(
    deny: str, resolved: Resolve, bundle: Path, tmp_path: Path
) -> None:
    found = resolved({"SSL_CERT_FILE": str(bundle)}, deny=[deny.format(tmp_path)])
    assert found.grants == () and "SSL_CERT_FILE" not in found.environ
    assert found.network is not None and "the policy hides" in "\n".join(found.network.lines)
