"""The driver of a shell where there is no bash inside: `sh`, whichever that is.

A request is one line. The code in it is spelled with `printf %b`, since not
every sh has a quotation for line ends. `command eval` keeps a syntax error from
ending the shell; two loops, one in the other, keep a `break` from it. There is
no way to take up the state of an sh that exits: `exit`, `set -e` and an
interrupt end it, as the result says, and the next run has a fresh one.

An sh has names for descriptors of one digit only, so the last five are taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stockade.live.bash import check, check_size

DRIVER = (
    "exec 5<&0 6>&1 7>&2 8<&3 9>&4 3<&- 4>&- </dev/null >/dev/null 2>&1; _stockade= _stockade_s=0; "
    'while :; do while command printf \'\\n%s %d 0\\n\' "$_stockade" "$_stockade_s" >&9 && '
    '_stockade= && IFS= command read -r _stockade_c <&8 || exit "$_stockade_s"; '
    'do eval "$_stockade_c"; _stockade_s=$?; done; done'
)
REQUEST = (
    "_stockade=%(number)s _stockade_s=0; %(values)s%(env)scommand eval %(code)s "
    "</proc/self/fd/5 >/proc/self/fd/6 2>/proc/self/fd/7\n"
)
#: A substitution loses line ends at its end; behind this they are not there.
DOT = "."
#: Everything that a single quotation mark or `printf %b` gives a meaning, and what is not printed.
UNSAFE = re.compile(rb"[^ -&(-\[\]-~]")


def command(files: int) -> list[str]:
    """What to start."""
    return ["sh", "-c", DRIVER, "sh"]


def request(code: str, env: Mapping[str, str], number: bytes, files: int) -> bytes:
    """What to send for the code to be run."""
    check(code, env)
    values = "".join(
        f"_stockade_{n}={quoted(value + DOT)}; _stockade_{n}=${{_stockade_{n}%{DOT}}}; "
        for n, value in enumerate(env.values())
    )
    given = "".join(f'{name}="$_stockade_{n}" ' for n, name in enumerate(env))
    words = {"number": number.decode(), "values": values, "env": given, "code": quoted(code)}
    text = REQUEST % words
    check_size(text)
    return text.encode()


def quoted(text: str) -> str:
    """The text as one word of sh, in plain ASCII on one line, but for the line ends at its end."""
    data = text.encode("utf-8", "surrogateescape")
    spelled = UNSAFE.sub(lambda found: b"\\0%03o" % found[0][0], data).decode()
    return f"\"$(command printf %b '{spelled}')\""
