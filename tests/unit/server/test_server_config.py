"""The configuration of the server: every error names the file, the line and the key."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from stockade.errors import PolicyError
from stockade.server.config import CHECKS, ServerConfig, load_config, parse_config, with_address, with_listen

EXAMPLE = Path(__file__).parents[3] / "docs" / "reference" / "serve.toml"


def test_without_a_file_the_server_listens_on_loopback() -> None:
    config = load_config(None, {})
    assert config == ServerConfig()
    assert config.address == ("127.0.0.1", 8080) and config.is_local


def test_the_example_file_is_valid_and_shows_every_key() -> None:
    text = EXAMPLE.read_text()
    parse_config(text, "serve.toml")
    commented = re.findall(r"^# (\w+ = .*)$", text, re.MULTILINE)
    defaults = parse_config("\n".join(commented), "serve.toml")
    assert msgspec.structs.replace(defaults, upper_root="") == ServerConfig()
    assert [key for key in CHECKS if f"{key} =" not in text and f"[{key}]" not in text] == []


def test_the_variable_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('listen = "[::1]:9000"\nnetwork = ["example.com"]\n')
    config = load_config(None, {"STOCKADE_SERVER_CONFIG": str(file)})
    assert config.address == ("::1", 9000) and config.is_local
    assert config.network == ("example.com",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lissten = 1", "serve.toml:1: lissten: there is no such key"),
        ('\nlisten = "8080"', "serve.toml:2: listen"),
        ("idle_timeout = -1", "serve.toml:1: idle_timeout"),
        ('[images]\n"a" = 7', "serve.toml:2: images.a"),
        ('writable_paths = [\n  "/data",\n  "work",\n]', "serve.toml:3: writable_paths"),
        ('\nnetwork = "a.example"', 'serve.toml:2: network = "a.example": rules are a list'),
        ('network = [\n  "a.example",\n  "b c",\n]', 'serve.toml:3: network[1] = "b c"'),
        ('network = "open"', "serve.toml:1: network"),
        ('[ceiling]\nmemory = "1G"', "serve.toml:2: ceiling.memory"),
        ('[ceiling.limits]\nmemory = "lots"', "serve.toml:2: ceiling.limits.memory"),
        ('deny_syscalls = ["opeen"]', "serve.toml:1: deny_syscalls"),
        ('line_endings = "crlf"', "serve.toml:1: line_endings"),
        ('origins = ["example.com"]', "serve.toml:1: origins"),
        ("listen = 1 2", "serve.toml is not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_config(text, "serve.toml")
    assert words in str(caught.value)


def test_a_mistyped_key_gets_the_nearest_name() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_config("diff_max_byte = 1", "serve.toml")
    assert caught.value.hint == "did you mean diff_max_bytes?"


def test_images_are_found_by_pattern() -> None:
    config = parse_config('[images]\n"python:*" = "host"\n"tools" = "tools:2"', "serve.toml")
    assert config.image_of("python:3.12") == "host"
    assert config.image_of("opensandbox/code-interpreter:v1") == "host"
    assert config.image_of("tools") == "tools:2"
    assert config.image_of("ubuntu") is None


def test_the_operator_can_say_what_the_code_interpreters_image_is() -> None:
    config = parse_config('[images]\n"opensandbox/code-interpreter:*" = "data-tools"', "serve.toml")
    assert config.image_of("opensandbox/code-interpreter:latest") == "data-tools"
    assert config.image_of("host") == "host"


def test_a_hint_about_the_network_names_the_key_of_this_file() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_config('network = "a.example"', "serve.toml")
    assert caught.value.hint == 'write network = ["a.example"]'


def test_a_missing_file_says_who_named_it_and_nothing_about_policies(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        load_config(None, {"STOCKADE_SERVER_CONFIG": str(tmp_path / "no.toml")})
    assert "STOCKADE_SERVER_CONFIG names it" in caught.value.message
    assert "serve.toml" in caught.value.hint and "policy" not in caught.value.hint


def test_the_command_line_wins_and_is_checked() -> None:
    assert with_listen(ServerConfig(), "0.0.0.0:80").is_local is False
    with pytest.raises(PolicyError) as caught:
        with_listen(ServerConfig(), "8081")
    assert caught.value.hint == "write --listen 127.0.0.1:8081, or --port 8081"


def test_the_address_and_the_port_can_be_given_by_themselves() -> None:
    config = ServerConfig(listen="127.0.0.2:9000")
    assert with_address(config, None, None) == config
    assert with_address(config, None, "80").address == ("127.0.0.2", 80)
    assert with_address(config, "::1", None).address == ("::1", 9000)
    assert with_address(config, "[::1]", "1").address == ("::1", 1)
    for host, port in (
        (None, "x"),
        (None, "65536"),
        (None, "-1"),
        ("", None),
        ("a:80", None),
        ("http://a", None),
    ):
        with pytest.raises(PolicyError):
            with_address(config, host, port)
