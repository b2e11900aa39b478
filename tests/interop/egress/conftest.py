"""Servers of packages in the small internet."""

from __future__ import annotations

import hashlib
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.network import Internet


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
