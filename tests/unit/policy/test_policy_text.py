"""Policies as TOML: read with file and line, written so that they read back equal."""

from __future__ import annotations

import contextlib
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.errors import PolicyError
from stockade.policy import Policy, parse
from stockade.policy.toml import line_of, load

EVERYTHING = """
profile = "dev"
read = ["/opt/data", "data?", "~/x", "$DATA/y"]
write = ["./out"]
deny = [".env", "~/.ssh"]
exec = ["/usr/bin/*", "tools/**?"]
hold_back = ["deploy", "**/*.sql"]
allow_commit = [".vscode"]
protect = [".git"]
unprotect = ["sub/.git"]
net = "open"
env = { CI = "1", "A B" = "\\u0001\\u007f\\"\\\\" }
pass_env = ["LANG"]
image = "host"
backend = "native"
accept = ["limits.tasks"]
toolchain = ["cargo"]
delegate = true
net_roots = "~/company.pem"
on_egress_end = "end"
proxy = true
receipts = "batched"

[workspace]
path = "."
mode = "rw"

[limits]
tasks = 64
wall = "30s"
output = "10M"
files = 100
disk = "1G"

[syscalls]
allow = ["ptrace"]
deny = ["bpf"]

[secrets.TOKEN]
from_file = "token"
hosts = ["API.example.com", "http://intranet.example:8080"]
as = "header:X-Api-Key"

[secrets.OTHER]
from_command = ["pass", "show", "it"]
hosts = ["api.example.com"]
as = ["bearer", "query:key"]
inside = "both"
"""


def test_every_clause_can_be_written_in_toml() -> None:
    policy = parse(EVERYTHING, base="/project")
    assert policy.table(full=True).keys() == policy.table().keys() | {"image"}
    assert policy.read == ("/opt/data", "/project/./data?", "~/x", "$DATA/y")
    assert policy.write == ("/project/./out",)
    assert policy.deny == (".env", "~/.ssh")
    assert policy.exec == ("/usr/bin/*", "/project/./tools/**?")
    assert policy.workspace is not None
    assert policy.workspace.path == "/project"
    assert policy.secrets["TOKEN"].from_file == "/project/./token"
    assert policy.secrets["TOKEN"].hosts == ("api.example.com", "http://intranet.example:8080")
    assert policy.secrets["TOKEN"].as_ == ("header:x-api-key",)
    assert policy.env["A B"] == '\x01\x7f"\\'


def test_what_is_written_reads_back_equal() -> None:
    policy = parse(EVERYTHING, base="/project")
    assert Policy.from_toml(policy.to_toml()) == policy
    assert Policy.from_toml(Policy().to_toml()) == Policy()


NAMES = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1, max_size=8)
PATHS = NAMES.map(lambda name: "/" + name.replace("/", "_").replace("..", "_"))


@given(
    read=st.lists(PATHS),
    env=st.dictionaries(NAMES, st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
    pass_env=st.lists(NAMES),
    wall=st.none() | st.floats(0.001, 1e6),
    output=st.none() | st.integers(1, (1 << 63) - 1),
    workspace=st.none() | PATHS,
)
def test_toml_keeps_every_value(
    read: list[str], env: dict[str, str], pass_env: list[str], workspace: str | None, **limits: Any
) -> None:
    policy = Policy(read=read, env=env, pass_env=pass_env, workspace=workspace, limits=limits)
    text = policy.to_toml()
    assert Policy.from_toml(text) == policy
    assert Policy.from_toml(text).to_toml() == text


def test_relative_paths_count_from_the_files_directory(tmp_path: Path) -> None:
    file = tmp_path / "a$b" / "p.toml"
    file.parent.mkdir()
    file.write_text('read = ["x", "../y?"]\n[workspace]\nmode = "ro"\n')
    policy = load(str(file))
    assert policy.read == (f"{tmp_path}/a$$b/./x", f"{tmp_path}/./y?")
    assert policy.workspace is not None
    assert policy.workspace.path == f"{tmp_path}/a$$b"


WRONG = [
    ('\nreed = ["/a"]\n', 2, "reed", "did you mean read?"),
    ('[limits]\n# wall = "x"\nwall = "x"\n', 3, 'limits.wall = "x"', "30s"),
    ('profile = "dev"\nlimits.wall = "x"\n', 2, "limits.wall", ""),
    ('profile = "dev"\nlimits = { wall = "x" }\n', 2, "limits.wall", ""),
    ('read = [\n  "/a",\n  "/b/../c",\n]\n', 3, "/b/../c", ""),
    ('[limits]\ntasks = 3\n\n[workspace]\n"mode" = "no"\n', 5, "workspace.mode", "ro"),
    ("[limits]\nmemory = '64K'\n", 2, "must be at least 2M", ""),
    (
        '[secrets.TOKEN]\nfrom_env = "TOKEN"\nhosts = "a"\n',
        3,
        "must be a list",
        'write secrets.TOKEN.hosts = ["a"]',
    ),
    ('[secrets.TOKEN]\nfrom_env = "TOKEN"\n', 1, "names no host", "write secrets.TOKEN.hosts = "),
    ('[secrets.TOKEN]\nvalue = "sk-1"\n', 2, "there is no such key", "a policy never has the value itself"),
    ("env = { A = 1 }\n", 1, "env.A = 1", ""),
    (
        'net = [\n  "a.example",\n  "https://b.example",\n]\n',
        3,
        'net[1] = "https://b.example"',
        "b.example:443",
    ),
    ("limits = 1979-05-27\n", 1, "must be a table", ""),
]


@pytest.mark.parametrize(("text", "line", "message", "hint"), WRONG, ids=lambda value: str(value)[:30])
def test_a_mistake_is_named_with_file_line_and_remedy(text: str, line: int, message: str, hint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text, name="p.toml")
    assert caught.value.message.startswith(f"p.toml:{line}: " if line else "p.toml: ")
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ["read = [", "a = 1\na = 2", "x = " + "[" * 5000, "x = " + "9" * 9000, "\0"])
def test_what_is_not_toml_is_a_policy_error(text: str) -> None:
    with pytest.raises(PolicyError, match=r"p\.toml"):
        parse(text, name="p.toml")


@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "x = {{{} = 1}}"])
def test_a_text_that_would_take_long_is_refused_at_once(form: str) -> None:
    text = form.format(".".join(["a"] * 100_000))
    begin = time.process_time()
    with pytest.raises(PolicyError, match="too many dots"):
        parse(text, name="p.toml")
    assert time.process_time() - begin < 5
    parse("\n".join(f"# {'.' * 80}" for _ in range(1000)))


@given(st.text(st.sampled_from("[]{}=.\"'#\n abwall,limits"), max_size=60))
def test_no_text_escapes_as_another_error(text: str) -> None:
    with contextlib.suppress(PolicyError):
        parse(text)
    line_of(text, ("limits", "wall"), "a")


def test_a_file_that_is_missing_is_a_policy_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot read"):
        load(str(tmp_path / "none.toml"))


def test_pyproject_holds_a_policy_in_its_own_table(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\nname = "x"\n[tool.stockade]\nprofile = "dev"\n[tool.stockade.limits]\nwall = 3\n'
    )
    assert load(str(file)) == Policy(profile="dev", limits={"wall": 3})
    file.write_text("[tool.stockade.limits]\nwall = -3\n")
    with pytest.raises(PolicyError, match=r"pyproject\.toml:2: limits\.wall"):
        load(str(file))
    file.write_text('[tool.stokade]\ndeny = [".env"]\n')
    with pytest.raises(PolicyError, match=r"has no \[tool\.stockade\]"):  # not a policy that denies nothing
        load(str(file))


def test_toml_is_what_tomllib_reads() -> None:
    table = {"workspace": {"path": ".", "mode": "overlay", "durable": False}}
    assert tomllib.loads(Policy(workspace=".").to_toml()) == table


def test_backends_can_be_listed_in_the_order_of_preference() -> None:
    policy = Policy.from_toml('backend = ["landlock", "native"]\n')
    assert policy.backend == ("landlock", "native")
    assert Policy.from_toml(policy.to_toml()) == policy
    assert Policy.from_toml('backend = ["native"]') == Policy(backend="native")
