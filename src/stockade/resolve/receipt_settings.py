"""The settings of receipts: the table [receipts] of the user's own config.toml.

They are not part of a policy, because a project must not decide who signs, or how.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.linux.path_lookup import names_on_the_way
from stockade.policy.toml import RECEIPTS, decode, read_file
from stockade.policy.values import nearest
from stockade.resolve.config_files import config_file


class Settings(msgspec.Struct, frozen=True):
    """How receipts are made."""

    #: Whether a receipt must be on the disk, safe from a loss of power, before the run returns.
    fsync: bool = False
    #: A file with the passphrase of the key, if the key is encrypted.
    passphrase_file: str = ""
    #: A second private key, which also signs every receipt.
    cosign: str = ""

    @property
    def secrets(self) -> tuple[str, ...]:
        """The real names of the secret files, and of the links that lead to them."""
        named = [path for path in (self.passphrase_file, self.cosign) if path]
        return tuple({name for path in named for name in names_on_the_way(path)})


def settings(environ: Mapping[str, str] = os.environ, home: str = "") -> Settings:
    """Read the settings of the user."""
    home = home or os.path.expanduser("~")
    path = config_file(environ, home)
    if not os.path.lexists(path):
        return Settings()
    data = read_file(path)
    if RECEIPTS.encode() not in data:  # spares most users the import of tomllib
        return Settings()
    table = decode(data.decode("utf-8", "replace"), path).get(RECEIPTS, {})
    if isinstance(table, str):
        return Settings()  # the clause of the policy
    return Settings(**_check_settings(table, path, home))


def _check_settings(table: Any, path: str, home: str) -> dict[str, Any]:
    names = Settings.__struct_fields__
    if not isinstance(table, dict):
        raise PolicyError(
            f"{path}: {RECEIPTS} must be a table", hint=f"write [{RECEIPTS}], and fsync = true below it"
        )
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
