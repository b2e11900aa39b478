"""What the programs of these tests need: a run without and with rules, packages, a repository."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stockade.policy.net_rules import parse_rule
from support.means import need_program
from support.network import Internet

GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


@pytest.fixture
def do(internet: Internet, tmp_path: Path) -> Any:
    """Run a command without Stockade and then behind rules; return what it printed there."""

    def both(
        argv: Sequence[str] | str, rules: Sequence[str], *options: str, env: dict[str, str] | None = None
    ) -> str:
        words = ["sh", "-ec", argv] if isinstance(argv, str) else list(argv)
        places = tmp_path / "outside", tmp_path / "inside"
        for place in places:
            place.mkdir()
        variables = env or {}
        control = internet.outside(words, cwd=places[0], env=variables)
        assert control.returncode == 0, (control.stdout, control.stderr)
        internet.clear()
        named = [f"--env={name}={value}" for name, value in variables.items()]
        result = internet.run(words, rules, *named, *options, cwd=places[1])
        assert result["exit_code"] == 0, {
            key: result[key] for key in ("outcome", "reason", "hint", "stdout", "stderr") if key in result
        }
        hosts = {parse_rule(rule).name for rule in rules}
        assert internet.asked() <= hosts, "only names of the rules are looked up"
        return str(result["stdout"])

    return both


@pytest.fixture
def packages(internet: Internet, tmp_path: Path) -> None:
    """An index of Python packages, at pypi.good.example."""
    names = {"first": ["second"], "second": []}
    for name, needs in names.items():
        place = tmp_path / "index" / "simple" / name
        place.mkdir(parents=True)
        info = f"{name}-1.0.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        lines += [f"Requires-Dist: {other}" for other in needs]
        files = {
            f"{name}.py": f"answer = {name!r}\n",
            f"{info}/METADATA": "\n".join(lines) + "\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{file},,\n" for file in files) + f"{info}/RECORD,,\n"
        with zipfile.ZipFile(place / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            for file, text in {**files, f"{info}/RECORD": record}.items():
                archive.writestr(file, text)
    internet.publish("pypi.good.example", tmp_path / "index")


@pytest.fixture
def registry(internet: Internet, tmp_path: Path) -> None:
    """A registry of Node packages, at npm.good.example."""
    package = tmp_path / "package"
    package.mkdir()
    about = {"name": "thing", "version": "1.0.0", "main": "index.js"}
    (package / "package.json").write_text(json.dumps(about))
    (package / "index.js").write_text("module.exports = 'the thing'\n")
    place = tmp_path / "registry" / "thing" / "-"
    place.mkdir(parents=True)
    with tarfile.open(place / "thing-1.0.0.tgz", "w:gz") as archive:
        archive.add(package, "package")
    digest = hashlib.sha1((place / "thing-1.0.0.tgz").read_bytes()).hexdigest()
    dist = {"tarball": "https://npm.good.example/thing/-/thing-1.0.0.tgz", "shasum": digest}
    document = {
        "name": "thing",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {"1.0.0": {**about, "dist": dist}},
    }
    (tmp_path / "registry" / "thing.json").write_text(json.dumps(document))
    internet.publish("npm.good.example", tmp_path / "registry")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A bare repository with one commit."""
    need_program("git")
    bare, work = tmp_path / "repositories" / "thing.git", tmp_path / "work"
    bare.parent.mkdir()
    work.mkdir()
    (work / "file").write_text("from far away\n")
    for words in (["init", "-qb", "main"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=work, env={**os.environ, **GIT}, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], env=os.environ | GIT, check=True)
    subprocess.run(["git", "update-server-info"], cwd=bare, env={**os.environ, **GIT}, check=True)
    return bare
