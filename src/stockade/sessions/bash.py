"""The driver of a shell: the script that bash starts with, and the requests that it reads.

The driver is a loop at the top level, so that `declare` and `cd` affect the
shell itself, and it is one line long, so that errors name the lines of the
user's code. A request is a length of nine digits and that many bytes of plain
ASCII, in which the code is quoted: bash counts characters, and how many bytes
a character has depends on the locale. Each run gets streams that are opened
anew from the pipes: flags that a program sets on them (O_NONBLOCK, for one)
and redirections by `exec` end with the run.

`exit`, `set -e` and an interrupt lead to a trap in which bash executes itself
again, in the same process, and reads the variables, functions, aliases,
options and traps of the old bash. Its children stay its children, but it no
longer lists them as jobs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stockade.errors import PolicyError
from stockade.gate.wire import EXEC_MAX_SIZE

#: The driver keeps its five descriptors above those that scripts usually name.
HIGHEST, LOWEST = 249, 10
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
UNSAFE = re.compile(rb"[^ -&(-\[\]-~]")

#: Prints the state that the next bash restores.
STATE = (
    "builtin unset _stockade_f; builtin declare -p; builtin declare -f; builtin declare -Fx; "
    "builtin alias -p; builtin trap -p; builtin shopt -p; builtin set +o; builtin echo set +e; "
    '[[ $FUNCNAME ]] || { builtin printf "set --"; builtin printf " %q" "$@"; }'
)
#: These signals end the shell, and not only the run.
DEADLY = ("HUP", "PIPE", "ALRM", "TERM", "USR1", "USR2")
DRIVER = (
    'if [[ $1 == again ]]; then _stockade_f=${2##*/}; builtin . "$2"; exec {_stockade_f}<&-; '
    "else exec %(in)d<&0 %(out)d>&1 %(err)d>&2 %(asks)d<&3 %(answers)d>&4 "
    "3<&- 4>&- </dev/null >/dev/null 2>&1; "
    "_stockade= _stockade_s=0 _stockade_r=; fi; "
    "builtin trap '_stockade_s=$?; [[ -o posix ]] || builtin exec -a bash /proc/self/exe "
    '-c "$BASH_EXECUTION_STRING" bash again <(%(state)s) </dev/null >/dev/null 2>&1\' EXIT; '
    "builtin trap '[[ $_stockade ]] && builtin exit 130' INT; %(deadly)s"
    'while builtin eval "$_stockade_r"; _stockade_r=; '
    'builtin printf \'\\n%%s %%d 0\\n\' "$_stockade" "$_stockade_s" >&%(answers)d && _stockade= && '
    "TMOUT= builtin read -r -N 9 -u %(asks)d _stockade_n && "
    'TMOUT= builtin read -r -N "$_stockade_n" -u %(asks)d _stockade_c || '
    '{ builtin trap - EXIT; builtin exit "$_stockade_s"; }; '
    'do builtin eval "$_stockade_c"; _stockade_s=$?; done'
)
#: `_stockade_r` holds the code that restores the variables and the directory after this run.
REQUEST = (
    "_stockade=%(number)s _stockade_s=0; %(env)sbuiltin eval %(code)s "
    "</proc/self/fd/%(in)d >/proc/self/fd/%(out)d 2>/proc/self/fd/%(err)d"
)


def command(files: int) -> list[str]:
    """Return the argv of a bash driver for processes that may have `files` open."""
    deadly = "".join(
        f"builtin trap 'builtin trap - EXIT {name}; builtin kill -{name} $$' {name}; " for name in DEADLY
    )
    return ["bash", "-c", DRIVER % {"state": STATE, "deadly": deadly, **_numbers(files)}, "bash"]


def check(code: str, env: Mapping[str, str]) -> None:
    """Refuse code and variables that no shell can take."""
    if "\0" in code:
        raise PolicyError("the code contains a NUL byte", hint="pass binary data through `input` or a file")
    for name in env:
        if not NAME.fullmatch(name):
            raise PolicyError(
                f"env: {name!r} cannot be the name of a shell variable", hint="use letters, digits and _"
            )


def request(code: str, env: Mapping[str, str], number: bytes, files: int, cwd: str = "") -> bytes:
    """Return the bytes that make the driver run the code, in `cwd` if that is not empty."""
    check(code, env)
    numbers = _numbers(files)
    before = _exported(env, numbers["err"]) + _entered(cwd, numbers["err"])
    words = {"number": number.decode(), "env": before, "code": quoted(code)}
    text = REQUEST % {**words, **numbers}
    check_size(text)
    return b"%09d" % len(text) + text.encode()


def check_size(text: str) -> None:
    """Refuse a request that is too long to send."""
    if len(text) > EXEC_MAX_SIZE:
        raise PolicyError(
            f"the code takes {len(text)} bytes, more than {EXEC_MAX_SIZE}",
            hint="pass large data through `input` or a file",
        )


def _exported(env: Mapping[str, str], errors: int) -> str:
    """Return code that saves and sets the variables of one run; a readonly variable fails the run."""
    if not env:
        return ""
    before = " ".join(f"builtin unset {name}; ${{{name}+${{{name}@A}};}}" for name in env)
    now = " ".join(f"{name}={quoted(value)}" for name, value in env.items())
    return f'_stockade_r="{before}"; builtin export {now} 2>/proc/self/fd/{errors} && '


def _entered(cwd: str, errors: int) -> str:
    """Return code that enters a directory for one run; one that cannot be entered fails the run."""
    if not cwd:
        return ""
    back = quoted('\nbuiltin cd -- "$_stockade_d" 2>/dev/null; builtin unset _stockade_d')
    return f"_stockade_d=$PWD _stockade_r+={back}; builtin cd -- {quoted(cwd)} 2>/proc/self/fd/{errors} && "


def quoted(text: str) -> str:
    """Quote the text as one word of bash, in plain ASCII."""
    data = text.encode("utf-8", "surrogateescape")
    return "$'" + UNSAFE.sub(lambda found: b"\\%03o" % found[0][0], data).decode() + "'"


def _numbers(files: int) -> dict[str, int]:
    first = max(LOWEST, min(HIGHEST, files - 7))
    return dict(zip(("in", "out", "err", "asks", "answers"), range(first, first + 5), strict=True))
