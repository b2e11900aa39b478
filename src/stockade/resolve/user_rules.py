"""Add a network rule to the user's own policy, config.toml, and leave everything else in it as it is.

The file is changed as text, so that comments stay. Before it is written, the new text is parsed: it must say
the same as before and have the one rule more. Otherwise nothing is written.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib

from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.resolve.config_files import config_file

#: The largest policy that is changed.
LARGEST = 1 << 20
_LIST = re.compile(r"^net[ \t]*=[ \t]*\[(?P<empty>\s*\])?", re.MULTILINE)
_WORD = re.compile(r"^net[ \t]*=[ \t]*[\"']ask[\"']", re.MULTILINE)


def add_rule(rule: str) -> str:
    """Write a rule into the policy of the user who runs this, and return the file's path."""
    caller = Caller.current()
    path = config_file(caller.environ, caller.home)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError:
        text = ""
    except UnicodeDecodeError:
        raise _refusal(path, rule, "it is not UTF-8") from None
    if len(text) > LARGEST:
        raise _refusal(path, rule, "it is too long")
    changed = with_rule(text, rule, path)
    if changed != text:
        _replace(path, changed)
    return path


def with_rule(text: str, rule: str, path: str = "config.toml") -> str:
    """Return the text of a policy with one more rule in `net`.

    >>> with_rule('net = ["a.example"]  # mine', "b.example:443")
    'net = ["b.example:443", "a.example"]  # mine'
    """
    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refusal(path, rule, f"it is not TOML: {error}") from None
    had = before.get("net", [])
    rules = ["ask"] if had == "ask" else had
    if not isinstance(rules, list):
        raise _refusal(path, rule, f"its net is {had!r} and not a list")
    if rule in rules:
        return text
    quoted = json.dumps(rule)
    if had == "ask":
        changed = _WORD.sub(lambda _: f'net = [{quoted}, "ask"]', text, count=1)
    elif "net" in before:
        changed = _LIST.sub(
            lambda found: f"net = [{quoted}]" if found["empty"] else f"net = [{quoted}, ", text, count=1
        )
    else:
        changed = f"net = [{quoted}]\n{text}"
    try:
        after = tomllib.loads(changed)
    except tomllib.TOMLDecodeError:
        after = {}
    if after != {**before, "net": [rule, *rules]}:
        raise _refusal(path, rule, "its net is written in a way that Stockade does not change")
    return changed


def _replace(path: str, text: str) -> None:
    """Replace the content of the file at once; the file that a link stands for."""
    real = os.path.realpath(path)
    directory = os.path.dirname(real)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    try:
        mode = os.stat(real).st_mode & 0o777
    except FileNotFoundError:
        mode = 0o600
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".config-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise


def _refusal(path: str, rule: str, why: str) -> PolicyError:
    return PolicyError(f"{path} is left as it is: {why}", hint=f'write "{rule}" into its net yourself')
