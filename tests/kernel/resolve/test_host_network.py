"""A program with the host's network finds the user's certificates and proxies, whatever the backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy, backends, cli
from support.certificates import CERTIFICATE, PRIVATE_KEY
from support.means import clauses_for

SHOW = 'cat "$SSL_CERT_FILE"; echo "$https_proxy"; echo "$NO_PROXY"; echo x >> "$SSL_CERT_FILE"'


@pytest.fixture(params=list(backends.BACKENDS))
def walls(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The clauses of a policy for each backend, with what it has only in part accepted."""
    return clauses_for(request.param)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the environment names as the certificates to trust, beside proxies."""
    path = tmp_path / "elsewhere" / "ca.pem"
    path.parent.mkdir()
    path.write_text(CERTIFICATE)
    (path.parent / "beside").write_text("beside")
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    monkeypatch.setenv("https_proxy", "http://me:hunter2@proxy.example:3128/")
    monkeypatch.setenv("NO_PROXY", "localhost,.example")
    return path


def test_the_program_reads_them_and_cannot_change_them(walls: dict[str, Any], bundle: Path) -> None:
    result = stockade.run(["sh", "-c", SHOW], Policy(**walls, net="open"))
    assert result.text == f"{CERTIFICATE}http://proxy.example:3128\nlocalhost,.example\n"
    assert result.exit_code != 0 and bundle.read_text() == CERTIFICATE
    beside = stockade.run(["cat", str(bundle.parent / "beside")], Policy(**walls, net="open"))
    assert beside.exit_code == 1 and not beside.stdout


def test_without_the_network_it_finds_neither(walls: dict[str, Any], bundle: Path) -> None:
    result = stockade.run(["sh", "-c", f"env; cat {bundle}"], Policy(**walls))
    assert result.exit_code == 1
    assert not any(word in result.text for word in ("SSL_CERT_FILE", "proxy", "PROXY", "BEGIN"))


def test_a_run_says_what_it_did_not_pass(bundle: Path) -> None:
    bundle.write_text(PRIVATE_KEY)
    result = stockade.run(["sh", "-c", f"env; cat {bundle}"], Policy(net="open"))
    assert result.exit_code == 1 and "\nSSL_CERT_FILE" not in result.text and "PRIVATE" not in result.text
    assert f"SSL_CERT_FILE is not passed: {bundle} has a private key in it" in result.warnings


def test_the_plan_shows_them(
    bundle: Path, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    assert cli.main(["plan", "--net", "open", "--", "true"]) == 0
    told = capsys.readouterr().out
    assert f"show {bundle} read-only" in told and 'net = "open", for SSL_CERT_FILE' in told
    assert 'with https_proxy=http://proxy.example:3128, because of net = "open"' in told
    assert "https_proxy is passed without its user and password" in told and "hunter2" not in told
    assert cli.main(["plan", "--net", "open", "--json", "--", "true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["passed"]["SSL_CERT_FILE"] == str(bundle)
    assert cli.main(["plan", "--json", "--", "true"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] == {}
