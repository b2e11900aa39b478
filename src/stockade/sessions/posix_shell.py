"""The driver of a shell if the sandbox shows no bash: `sh`, whichever shell that is.

A request is one line. It spells the code with `printf %b`, because not every
sh can quote a line end. `command eval` keeps a syntax error from ending the
shell; two nested loops keep a `break` from ending it. The state of an sh that
exits cannot be restored: `exit`, `set -e` and an interrupt end the shell, the
result says so, and the next run starts a fresh one.

An sh can only name descriptors of one digit, so the driver takes the last five.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stockade.sessions.bash import check, check_size

DRIVER = (
    "exec 5<&0 6>&1 7>&2 8<&3 9>&4 3<&- 4>&- </dev/null >/dev/null 2>&1; _stockade= _stockade_s=0; "
    'while :; do while command printf \'\\n%s %d 0\\n\' "$_stockade" "$_stockade_s" >&9 && '
    '_stockade= && IFS= command read -r _stockade_c <&8 || exit "$_stockade_s"; '
    'do eval "$_stockade_c"; _stockade_s=$?; done; done'
)
REQUEST = (
    "_stockade=%(number)s _stockade_s=0; %(values)s%(before)s%(env)scommand eval %(code)s "
    "</proc/self/fd/5 >/proc/self/fd/6 2>/proc/self/fd/7%(after)s\n"
)
BEFORE = "_stockade_d=$PWD; command cd -- %s 2>/proc/self/fd/7 && "
AFTER = '; _stockade_t=$?; command cd -- "$_stockade_d"; (exit "$_stockade_t")'
#: A command substitution strips trailing line ends; a dot behind them keeps them.
DOT = "."
#: Bytes with a meaning inside single quotes or to `printf %b`, and unprintable ones.
UNSAFE = re.compile(rb"[^ -&(-\[\]-~]")


def command(files: int) -> list[str]:
    """Return the argv of an sh driver."""
    return ["sh", "-c", DRIVER, "sh"]


def request(code: str, env: Mapping[str, str], number: bytes, files: int, cwd: str = "") -> bytes:
    """Return the bytes that make the driver run the code, in `cwd` if that is not empty."""
    check(code, env)
    values = "".join(
        f"_stockade_{n}={quoted(value + DOT)}; _stockade_{n}=${{_stockade_{n}%{DOT}}}; "
        for n, value in enumerate(env.values())
    )
    given = "".join(f'{name}="$_stockade_{n}" ' for n, name in enumerate(env))
    words = {"number": number.decode(), "values": values, "env": given, "code": quoted(code)}
    words |= {"before": BEFORE % quoted(cwd), "after": AFTER} if cwd else {"before": "", "after": ""}
    text = REQUEST % words
    check_size(text)
    return text.encode()


def quoted(text: str) -> str:
    """Quote the text as one word of sh, on one line of plain ASCII. Trailing line ends are lost."""
    data = text.encode("utf-8", "surrogateescape")
    spelled = UNSAFE.sub(lambda found: b"\\0%03o" % found[0][0], data).decode()
    return f"\"$(command printf %b '{spelled}')\""
