"""The names of images: those of container registries, and how they are written as names of directories."""

from __future__ import annotations

import re

from stockade.errors import PolicyError

_PLAIN = re.compile(r"[a-z0-9][a-z0-9._:/-]*")
_ESCAPES = {"/": "%2F", ":": "%3A"}
LONGEST = 200
#: What stands for the host's own system, so no image can have it.
HOST = "host"


def valid_name(name: str) -> str:
    """Return the name of an image, or raise PolicyError if it cannot be one."""
    if name == HOST:
        raise PolicyError(
            f"{HOST!r} is not a name for an image: it stands for this machine's own system",
            hint="choose another name, such as my-host",
        )
    if (
        not _PLAIN.fullmatch(name)
        or len(name) > LONGEST
        or any(part in ("", "..") for part in name.split("/"))
    ):
        raise PolicyError(
            f"{name!r:.250} is not a name for an image",
            hint="write small letters, digits and . _ - : /, such as python:3.12 or tools/base",
        )
    return name


def directory_name(name: str) -> str:
    """Return the name of the directory of an image."""
    valid_name(name)
    return "".join(_ESCAPES.get(letter, letter) for letter in name)
