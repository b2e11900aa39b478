"""What counts as a secret by its shape, and what does not."""

from __future__ import annotations

import os
import socket
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.observe.learning.secret_content import secret_in_file, secret_in_text, secret_in_variable
from stockade.policy.secret_services import SERVICES

BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
RANDOM = "8Zk2mQ7vT1xLr9Wc4Hs6Jd0Pf3Gn5By8Ka1Ue6Io"
KEY = "aB3" * 14 + "b="

SECRETS = {
    **{
        f"{kind}.txt": f"-----BEGIN {kind}-----\n{BODY}\n"
        for kind in (
            "PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY", "DSA PRIVATE KEY", "ENCRYPTED PRIVATE KEY",
            "OPENSSH PRIVATE KEY",
        )
    },
    "old.pem": f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES,0A\n\n{BODY}",
    "me.pgp": f"-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: GnuPG v2\n\n{BODY}",
    "after-certificates.pem": f"-----BEGIN CERTIFICATE-----\n{BODY}\n-----END CERTIFICATE-----\n"
    f"-----BEGIN PRIVATE KEY-----\n{BODY}",
    "account.json": '{"private_key": "-----BEGIN PRIVATE KEY-----\\n' + BODY + '\\n"}',
    "embedded.py": f'KEY = """-----BEGIN PRIVATE KEY-----\n{BODY}"""',
    "putty": "PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\n",
    "age.txt": f"# created: 2026\nAGE-SECRET-KEY-1{'Q' * 58}\n",
    "signify": "untrusted comment: signify secret key\nRWRCSwAAAABVN5lrWLtqFTf\n",
    "wg0.conf": f"[Interface]\nPrivateKey = {KEY}\n",
    "peer.conf": f"[Peer]\nPresharedKey={KEY}\n",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3In0.dozjgNryP4J3jVmNHl0w5N",
    "aws": "[default]\naws_access_key_id = AKIAQ4J7XKZ2M5N3T6WB\n",
    "aws-secret": "aws_secret_access_key = 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",
    "token.txt": "8Zk2mQ7vT1xLr9Wc4Hs6\n",
    "hex": "3f786850e387550fdab836ed7e6dc881de23001b\n",
    "login": f"ada\n{RANDOM}\n",
    "settings.ini": "[db]\npassword = hunter2\n",
    "settings.yaml": "db:\n  user: ada\n  password: hunter2\n",
    "settings.json": '{"db": {"password": "hunter2"}}',
    "environment": "export DB_PASS=hunter2\n",
    "connection": "Server=db;User=ada;Pwd=hunter2;Encrypt=true",
    "netrc": "machine api.example login ada password hunter2\n",
    "pgpass": "# servers\ndb.example:5432:*:ada:hunter2\n",
    "htpasswd": "ada:$apr1$Zk2mQ7vT$1xLr9Wc4Hs6Jd0\n",
    "remotes": "origin https://ada:hunter2@git.example/x.git\n",
    "config.json": '{"auths": {"https://registry.example": {"auth": "YWRhOmh1bnRlcjI="}}}',
    "admin.conf": f"users:\n- name: ada\n  user:\n    client-key-data: {BODY}\n",
    "npm": "//registry.example/:_authToken=abcdef-123456\n",
    "request": "GET / HTTP/1.1\nAuthorization: Bearer 8Zk2mQ7vT1xLr9\n",
}  # fmt: skip
ORDINARY = {
    "public.pem": f"-----BEGIN CERTIFICATE-----\n{BODY}\n",
    "key.pub": f"-----BEGIN PUBLIC KEY-----\n{BODY}\n",
    "id.pub": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ ada@example\n",
    "wg.pub": f"[Peer]\nPublicKey = {KEY}\n",
    "reader.py": 'if line == "-----BEGIN PRIVATE KEY-----":\n    password = ask_for_password()\n',
    "client.js": "const token = response.headers.token;\nfetch('https://user:password@host.example')\n",
    "manual.txt": "Password: the password of the user. A token is a string.\n",
    "template.ini": "password = ${DB_PASSWORD}\ntoken = <your token>\nsecret = changeme\n",
    "package.json": '{"dependencies": {"js-tokens": "^4.0.0", "@x/token": "workspace:*"}}',
    "de.json": '{"password": "Passwort", "token": "Marke"}',
    "tokenizer.json": '{"unk_token": "<unk>", "pad_token": "[PAD]", "max_token": 512}',
    "workflow.yml": "permissions:\n  id-token: write\nenv:\n  TOKEN: ${{ secrets.TOKEN }}\n",
    "example.sh": "export AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE\n",
    "archive.tar.gz.sha256": "3f786850e387550fdab836ed7e6dc881de23001b3f786850e387550fdab836ed\n",
    "version": "3.11.7-1+deb12u1\n",
    "words": "python3-setuptools-rust\n",
    "passwd-like": "root:x:0:0:root:/root:/bin/bash\n",
    "stack.h": "#define sk_X509_NAME_ENTRY_new_reserve(cmp, n) ((STACK_OF(X509) *)x)\n",
    "empty": "",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_recognised_by_its_shape(name: str) -> None:
    assert secret_in_text(SECRETS[name], name)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_text_is_no_secret(name: str) -> None:
    assert secret_in_text(ORDINARY[name], name) == ""


@pytest.mark.parametrize("prefix", sorted({service.prefix for service in SERVICES.values()} - {""}))
def test_the_keys_of_every_service_that_stockade_knows_are_recognised(prefix: str) -> None:
    assert secret_in_text(f"client = Client('{prefix}{RANDOM}')\n", "client.py")


@pytest.mark.parametrize(
    "token",
    ["ghs_", "github_pat_", "gldt-", "xoxp-1234-", "xapp-1-", "dckr_pat_", "ya29.", "hvs.", "tskey-auth-"],
)
def test_tokens_of_other_services_are_recognised(token: str) -> None:
    assert secret_in_text(f"# see {token}{RANDOM}{RANDOM}\n", "notes.md")


@pytest.mark.parametrize(
    "value",
    [
        "-Xmx1g -PnexusPass=hunter2", "-Dhttp.proxyPassword=hunter2", "-Drepo.pwd=hunter2", "-Dapi.key=h2",
        "--proxy-password hunter2", "https://ada:hunter2@pypi.example", "https://ada:hun/ter2@pypi.example",
        "https://token@pypi.example", "https://pypi.example/t/ab12cd34/simple",
        "https://dl.example/x7Kq29LmPz84TvWn/simple", "https://pypi.example/simple?sig=hunter2",
        "/srv/links https://ada:hunter2@pypi.example",
    ],
)  # fmt: skip
def test_a_variable_with_a_login_in_it_is_recognised(value: str) -> None:
    assert secret_in_variable(value)


@pytest.mark.parametrize(
    "value",
    [
        "-Xmx2g -XX:+UseG1GC -Djava.net.preferIPv4Stack=true", "-O2 -g -fstack-protector-strong -Wno-signal",
        "https://pypi.example/simple", "-j4 --output-sync", "-k keyboard -x --maxfail=1", "1700000000",
        "/srv/wheels", "https://proxy.example,direct", "-Dkey.file=/etc/keys",
    ],
)  # fmt: skip
def test_ordinary_options_are_no_secret(value: str) -> None:
    assert secret_in_variable(value) == ""


@given(st.text())
def test_any_text_has_an_answer(text: str) -> None:
    assert isinstance(secret_in_text(text) + secret_in_variable(text), str)


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 400_000 + "password",
        "pass=" * 400_000,
        "-eyJ" * 400_000,
        "://a:" * 100_000,
        "_auth" + " " * 400_000,
    ],
)
def test_hostile_text_takes_no_longer(text: str) -> None:
    before = time.process_time()
    secret_in_text(text, "settings.ini")
    assert time.process_time() - before < 5


def test_a_text_as_windows_writes_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes("password = hunter2\r\n".encode("utf-16"))
    assert secret_in_file(str(tmp_path / "x"))[0]
    (tmp_path / "x").write_bytes(SECRETS["PRIVATE KEY.txt"].encode("utf-16-le"))
    assert secret_in_file(str(tmp_path / "x"))[0]


@pytest.mark.parametrize("beginning", ["fe ed fe ed 00", "05 02 00 00 00", "30 82 04 bd 02 01 00 30"])
def test_key_stores_and_keys_in_der_are_recognised(tmp_path: Path, beginning: str) -> None:
    (tmp_path / "x").write_bytes(bytes.fromhex(beginning) + bytes(100))
    assert secret_in_file(str(tmp_path / "x"))[0]


def test_a_certificate_in_der_is_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes.fromhex("30 82 03 77 30 82 02 5f a0 03 02 01 02") + bytes(100))
    assert secret_in_file(str(tmp_path / "x"))[0] == ""


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/hostname")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("pipe", "link", "socket"):
            with pytest.raises(OSError, match=r"No such device|symbolic"):
                secret_in_file(str(tmp_path / name))


def test_the_systems_certificates_and_pythons_own_modules_are_no_secrets() -> None:
    roots = Path("/etc/ssl/certs").rglob("*")
    modules = [
        *Path(sysconfig.get_path("stdlib")).glob("*.py"),
        *Path("/usr/share/ca-certificates").rglob("*.crt"),
    ]
    files = [path for path in (*roots, *modules) if path.is_file() and not path.is_symlink()]
    assert len(files) > 100
    assert [path for path in files if secret_in_file(str(path))[0]] == []
