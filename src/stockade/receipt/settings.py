"""What the user's own config.toml says about receipts, in its table [receipts].

No policy says it: a project must not decide who signs, nor how.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.policy.load import config_file, read_file
from stockade.policy.text import RECEIPTS, decode
from stockade.policy.values import nearest


class Settings(msgspec.Struct, frozen=True):
    """How receipts are made."""

    #: Whether a receipt must outlive a loss of power from the moment the run returns.
    fsync: bool = False
    #: A file with the passphrase of the key, where that is encrypted.
    passphrase_file: str = ""
    #: A second private key that signs every receipt too.
    cosign: str = ""

    @property
    def secrets(self) -> tuple[str, ...]:
        """The real names of what nobody else may read, and of the links that lead there."""
        named = [path for path in (self.passphrase_file, self.cosign) if path]
        links = [
            os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in named
        ]
        return tuple({*links, *map(os.path.realpath, named)})


def settings(environ: Mapping[str, str] = os.environ, home: str = "") -> Settings:
    """The settings of the calling user."""
    home = home or os.path.expanduser("~")
    path = config_file(environ, home)
    if not os.path.lexists(path):
        return Settings()
    data = read_file(path)
    if RECEIPTS.encode() not in data:  # spares most users a parser of TOML
        return Settings()
    table = decode(data.decode("utf-8", "replace"), path).get(RECEIPTS, {})
    return Settings(**_checked(table, path, home))


def _checked(table: Any, path: str, home: str) -> dict[str, Any]:
    names = Settings.__struct_fields__
    if not isinstance(table, dict):
        raise PolicyError(f"{path}: {RECEIPTS} must be a table", hint=f"[{RECEIPTS}], then fsync = true")
    for name, value in table.items():
        if name not in names:
            raise PolicyError(
                f"{path}: {RECEIPTS}.{name}: there is no such key", hint=nearest(name, names, f"{RECEIPTS}.")
            )
        wanted = bool if name == "fsync" else str
        if not isinstance(value, wanted):
            words = "true or false" if wanted is bool else "a path"
            raise PolicyError(f"{path}: {RECEIPTS}.{name} = {value!r}: must be {words}")
    return {
        name: _path(value, path, home) if isinstance(value, str) else value for name, value in table.items()
    }


def _path(value: str, path: str, home: str) -> str:
    if value == "~" or value.startswith("~/"):
        value = home + value[1:]
    return os.path.join(os.path.dirname(path), value)
