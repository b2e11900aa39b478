"""Wheels of what is installed here: installers in tests get real packages, and fetch nothing."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

#: What Stockade needs, what builds it, and what installs it.
STOCKADE = ("cryptography", "h2", "msgspec", "pyOpenSSL", "pyseccomp", "setuptools", "pip")
#: What an installer added to the files of the wheel.
ADDED = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")


def fill(directory: Path, names: Iterable[str]) -> Path:
    """Write a wheel of each distribution, and of everything that it needs, into a directory."""
    directory.mkdir(exist_ok=True)
    waiting, known = list(names), set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in known:
            known.add(name)
            found = metadata.distribution(name)
            _pack(found, directory)
            wanted = map(Requirement, found.requires or ())
            waiting += [
                each.name for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})
            ]
    return directory


def _pack(found: metadata.Distribution, directory: Path) -> None:
    tag = next(line[5:] for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: "))
    name = re.sub(r"[-_.]+", "_", found.metadata["Name"])
    with zipfile.ZipFile(directory / f"{name}-{found.version}-{tag}.whl", "w") as archive:
        record = ""
        for file in found.files or ():
            # Scripts lie outside, and their entry points are in the metadata.
            if ".." in file.parts or file.suffix == ".pyc" or file.name in ADDED:
                continue
            content = file.read_binary()
            archive.writestr(str(file), content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record += f'"{file}",sha256={digest},{len(content)}\n'
            if file.name == "METADATA" and len(file.parts) == 2:
                info = file.parent
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
