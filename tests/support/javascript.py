"""The published JavaScript SDK, which `.ci/run` installs beside the agents."""

from __future__ import annotations

import json
from pathlib import Path

from support.means import need, need_program

PACKAGE = "@alibaba-group/opensandbox"
VERSION = "0.1.11"
MODULES = (Path("/usr/local/lib/node_modules"), Path("/usr/lib/node_modules"))


def javascript_sdk() -> str:
    """Return the path of the SDK's module, for `import` in a script that node runs."""
    need_program("node")
    for modules in MODULES:
        about = modules / PACKAGE / "package.json"
        if about.is_file() and json.loads(about.read_text())["version"] == VERSION:
            return str(about.with_name("dist") / "index.js")
    need(False, f"the npm package {PACKAGE} {VERSION} is not installed globally")
    raise AssertionError
