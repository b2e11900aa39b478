"""The plain values of a policy: how each is checked, normalised and written back.

Every check takes the dotted key and the value as written, and returns the one
form that Stockade keeps. It refuses an invalid value with `InvalidValueError`,
which has the key and the value, so that a loader can add file and line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from stockade.errors import PolicyError
from stockade.linux.path_lookup import counted
from stockade.policy import patterns

TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: Other spellings of the units of time.
TIME_WORDS = {
    **dict.fromkeys(("msec", "msecs", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
}
#: Every spelling of the units of size, in upper case. All mean powers of 1024: 512MB is 512M is 512MiB.
SIZE_WORDS = {"": 1, "B": 1}
for _unit, _bytes in SIZE_UNITS.items():
    SIZE_WORDS |= dict.fromkeys((_unit, f"{_unit}B", f"{_unit}IB"), _bytes)
LONGEST = 366 * 86400.0

Check = Callable[[str, Any], Any]


class InvalidValueError(PolicyError):
    """A key of a policy has an invalid value."""

    def __init__(self, key: str, value: object, problem: str, hint: str = "") -> None:
        super().__init__(f"{key} = {show(value)}: {problem}" if value is not None else f"{key}: {problem}")
        self.hint = hint
        self.key = key
        self.value = value
        self.problem = problem


class FrozenMap(dict[str, str]):
    """An immutable, hashable mapping; it is sorted, so that equal maps print alike."""

    def __init__(self, items: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(sorted(dict(items).items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, str]]]:
        return FrozenMap, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a policy is immutable; make a new one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse


def nearest(word: str, known: Iterable[str], before: str = "") -> str:
    """Return the hint for a name that does not exist: the one that was meant, or all of them."""
    from stockade.policy.suggestions import closest

    names = list(known)
    if near := closest(word, names):
        return f"did you mean {before}{near}?"
    return f"known: {', '.join(names)}" if len(names) < 32 else ""


def quote(text: str) -> str:
    """Quote text as a TOML basic string."""
    return '"' + text.translate(_ESCAPES) + '"'


_ESCAPES = {n: f"\\u{n:04x}" for n in (*range(32), 127)} | {ord('"'): '\\"', ord("\\"): "\\\\"}


def render(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{quote(str(k))} = {render(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(render, value))}]"
    return repr(value)


def show(value: object) -> str:
    """Return a value for a message: as TOML, and never longer than a line."""
    text = render(value)
    return text if len(text) <= 80 else text[:77] + "..."


def time_text(seconds: float) -> str:
    """Format seconds in the largest unit that keeps the number whole."""
    for unit in ("h", "m", "s", "ms"):
        count = seconds / TIME_UNITS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{seconds!r}s"


def time(key: str, value: Any) -> float | None:
    """Check a time and return seconds, from a number or text such as "250ms", "30s", "5min", "1h"."""
    hint = 'write seconds, or "250ms", "30s", "5m", "1h"'
    if value is None:
        return None
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str):
        digits, unit = _split_unit(value)
        number = _number(digits)
        if number is not None:
            seconds = TIME_UNITS.get(TIME_WORDS.get(unit, unit))
            number = number * seconds if seconds else None
    if number is None:
        raise InvalidValueError(key, value, "is not a time", hint)
    # A NaN fails both comparisons, so the test is written for what is allowed.
    if not 0.001 <= number <= LONGEST:
        raise InvalidValueError(key, value, "must be between 1ms and 366 days", hint)
    return float(number)


def size(key: str, value: Any) -> int | None:
    """Check a size and return bytes, from a whole number or text such as "64K", "10M", "1GiB"."""
    hint = 'write bytes, or "64K", "10M", "1G"'
    if value is None:
        return None
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value:
        digits, unit = _split_unit(value)
        bytes_each = SIZE_WORDS.get(unit.upper())
        number = int(digits) * bytes_each if bytes_each and _whole(digits) else None
    if number is None:
        raise InvalidValueError(key, value, "is not a size", hint)
    if not 1 <= number < 1 << 63:
        raise InvalidValueError(key, value, "must be at least one byte and fit 63 bits", hint)
    return number


def size_from(least: int) -> Check:
    """Return a check for sizes of at least `least` bytes."""
    hint = 'a number without a unit is bytes: write "64K", "10M", "1G"'

    def check(key: str, value: Any) -> int | None:
        number = size(key, value)
        if number is not None and number < least:
            raise InvalidValueError(key, value, f"must be at least {size_text(least)}", hint)
        return number

    return check


def size_text(number: int) -> str:
    """Format bytes in the largest unit that keeps the number whole."""
    units = [(count, unit) for unit, count in SIZE_UNITS.items() if number % count == 0]
    count, unit = max(units, default=(1, ""))
    return f"{number // count}{unit}"


def cores(key: str, value: Any) -> float | None:
    """Check a number of cores; the kernel allows no less than a hundredth."""
    if value is None:
        return None
    number = _number(value) if isinstance(value, str) else value
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise InvalidValueError(key, value, "is not a number of cores", "write a number such as 0.5 or 2")
    # A NaN fails both comparisons, so the test is written for what is allowed.
    if not 0.01 <= number <= 1024:
        raise InvalidValueError(key, value, "must be between 0.01 and 1024 cores")
    return float(number)


def count(most: int, least: int = 1) -> Check:
    """Return a check for whole numbers from `least` to `most`; it accepts digits as text."""

    def check(key: str, value: Any) -> int | None:
        if value is None:
            return None
        number = int(value) if isinstance(value, str) and _whole(value) else value
        if not isinstance(number, int) or isinstance(number, bool):
            raise InvalidValueError(key, value, "is not a whole number", "write a number such as 64")
        if not least <= number <= most:
            raise InvalidValueError(key, value, f"must be between {least} and {most}")
        return number

    return check


def flag(key: str, value: Any) -> bool:
    """Check that a value is true or false."""
    if not isinstance(value, bool):
        raise InvalidValueError(key, value, "must be true or false")
    return value


def one_of(*names: str, later: Iterable[str] = ()) -> Check:
    """Return a check for one of a few words; `later` are words that a later version may serve."""

    def check(key: str, value: Any) -> str:
        if value in later:
            raise InvalidValueError(key, value, "this version does not have it", f"known: {', '.join(names)}")
        if not isinstance(value, str) or value not in names:
            raise InvalidValueError(key, value, "is not a known value", nearest(str(value), names))
        return str(value)

    return check


def many(check: Check) -> Check:
    """Return a check for a list whose items all pass `check`; it returns a tuple without repetitions."""

    def check_all(key: str, value: Any) -> tuple[Any, ...]:
        if value == ():
            return ()
        if not isinstance(value, list | tuple | set | frozenset):
            raise InvalidValueError(key, value, "must be a list", f"write {key} = [{show(value)}]")
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return tuple(dict.fromkeys(check(key, item) for item in items))

    return check_all


def path(key: str, value: Any) -> str:
    """Check a path and return it as written; `resolve` finds out where it leads."""
    text = str(_plain(key, value, "a path"))
    if text.startswith("~") and text[1:2] not in ("", "/", "?"):
        raise InvalidValueError(
            key, value, "only ~ and ~/... stand for a home", f"write ./{text} for a file of that name"
        )
    down = False
    for part in text.split("/"):
        if part == ".." and (down or text.startswith("/")):
            raise InvalidValueError(key, value, "has a .. after a name, where a link could lead elsewhere")
        down = down or part not in ("", ".", "..")
    return text


def literal(name: str) -> str:
    """Quote a file name as a policy's path, so that a $ in it stands for itself."""
    return name.replace("$", "$$")


def grant(key: str, value: Any) -> str:
    """Check a path that may end in ?, for "if it exists"."""
    text = path(key, value)
    if text == "?":
        raise InvalidValueError(key, value, "is empty")
    return text


def denied(key: str, value: Any) -> str:
    """Check a path to hide, whether it exists or not, or a pattern for such paths."""
    text = path(key, value)
    if problem := patterns.problem(text):
        raise InvalidValueError(key, value, *problem)
    if ".." in text.split("/"):
        raise InvalidValueError(
            key,
            value,
            "is relative to the workspace, and leads out of it",
            "write it relative to the workspace without .., or in full: /..., ~/...",
        )
    return text


#: How `protect` writes a * in a name, as `deny` does.
STAR = "[*]"


def inside(key: str, value: Any) -> str:
    """Check a relative path that stays in the workspace."""
    text = _plain(key, value, "a path")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if text.startswith(("/", "~")) or ".." in parts or not parts:
        hint = "write it relative to the workspace, such as src/main.py"
        raise InvalidValueError(key, value, "must be a relative path inside the workspace, without ..", hint)
    return "/".join(parts)


def protected(key: str, value: Any) -> str:
    """Check a path of the workspace that must not change; it must not be a pattern."""
    text = inside(key, value)
    if "*" in text.replace(STAR, ""):
        hint = f"name each path, or their directory; write {STAR} for a * in a name"
        raise InvalidValueError(key, value, "takes no patterns", hint)
    return f"./{text}" if text.startswith("~") else text


def quote_protected(name: str) -> str:
    """Quote a path of the workspace for `protect`."""
    return f"{'./' if name.startswith('~') else ''}{name.replace('*', STAR)}"


def unquote_protected(text: str) -> str:
    """Return the path of the workspace that a `protect` names."""
    return text.removeprefix("./").replace(STAR, "*")


def unprotected(key: str, value: Any) -> str:
    """Check a path that is to lose its protection: relative to the workspace, or absolute."""
    text = _plain(key, value, "a path")
    if not text.startswith("/"):
        return protected(key, value)
    if ".." in text.split("/"):
        raise InvalidValueError(key, value, "must not contain ..")
    return "/" + protected(key, text.lstrip("/")).removeprefix("./")


def variable(key: str, value: Any) -> str:
    """Check the name of an environment variable."""
    name = _plain(key, value, "a variable's name")
    if "=" in name:
        raise InvalidValueError(key, value, "the name of a variable must not contain =")
    return name


def variables(key: str, value: Any) -> FrozenMap:
    """Check names and values of environment variables."""
    if type(value) is FrozenMap:
        return value
    if not isinstance(value, Mapping):
        raise InvalidValueError(key, value, "must be a table", f'write {key} = {{ NAME = "value" }}')
    for name, text in value.items():
        variable(key, name)
        if not isinstance(text, str) or "\0" in text:
            raise InvalidValueError(
                f"{key}.{name}", text, "must be text without NUL", f'write {name} = "{text}"'
            )
    return FrozenMap(value)


def command(key: str, value: Any) -> str:
    """Check the name or path of a command."""
    return _plain(key, value, "a command")


def syscall(key: str, value: Any) -> str:
    """Check the name of a system call against those that libseccomp knows."""
    name = _plain(key, value, "a system call's name")
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError):  # without libseccomp no filter is compiled here either
        return name
    if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) == -1:
        raise InvalidValueError(key, value, "is not a system call", nearest(name, _syscalls()))
    return name


def allowed_call(key: str, value: Any) -> str:
    """Check the name of a system call, or of a socket option that is closed by default."""
    from stockade.policy.socket_options import NAMES, clause_for, is_open

    name = _plain(key, value, "a system call's name")
    if name in NAMES:
        return name
    if clause := clause_for(name.upper()) or clause_for(name.lower()):
        raise InvalidValueError(key, value, "is opened by another name", f"write {quote(clause)}")
    if is_open(name):
        raise InvalidValueError(key, value, "is open in every sandbox", "leave it out")
    if name.isupper():
        hint = nearest(name, NAMES) or "leave it out; names of system calls are in small letters"
        raise InvalidValueError(key, value, "is not a socket option that a policy can open", hint)
    return syscall(key, name)


def _syscalls() -> Iterator[str]:
    import pyseccomp

    for number in range(512):
        try:
            yield pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, number).decode()
        except ValueError:
            continue


def _plain(key: str, value: Any, what: str) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise InvalidValueError(key, value, f"must be {what} as text")
    if not text:
        raise InvalidValueError(key, value, "is empty")
    if "\0" in text:
        raise InvalidValueError(key, value, "has a NUL byte in it")
    return text


def _split_unit(text: str) -> tuple[str, str]:
    """Split "30 sec" or "512MB" into the number and the letters after it."""
    number = text.rstrip(_LETTERS)
    return number.rstrip(" "), text[len(number) :]


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _whole(text: str) -> bool:
    # isdigit() alone accepts digits of other scripts, and int() underscores and signs;
    # the length keeps int() below its own limit, and fast.
    return text.isascii() and text.isdigit() and len(text) <= 19


def _number(text: str) -> float | None:
    head, dot, tail = text.partition(".")
    good = _whole(head) and (not dot or _whole(tail))
    return float(text) if good else None


def expand(path: str, clause: str, *, home: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Make a path absolute: replace ~ and $VARIABLE ($$ is a $); a relative path is relative to `cwd`."""
    found = _substitute_variables(path, clause, environ) if "$" in path else path
    if path.startswith("~"):
        found = home + found[1:]
    if "\0" in found:
        raise PolicyError(f"{clause}: has a NUL byte in it")
    if found.startswith("/"):
        return found
    if not cwd:
        raise PolicyError(
            f"{clause}: is relative, and the current directory was removed", hint="write an absolute path"
        )
    return counted(found, cwd)


def _substitute_variables(path: str, clause: str, environ: Mapping[str, str]) -> str:
    done, rest = "", path
    while "$" in rest:
        before, _, rest = rest.partition("$")
        done += before
        if rest.startswith("$"):
            done, rest = done + "$", rest[1:]
            continue
        if rest.startswith("{"):
            name, _, rest = rest[1:].partition("}")
        else:
            end = next((i for i, c in enumerate(rest) if not (c.isalnum() or c == "_")), len(rest))
            name, rest = rest[:end], rest[end:]
        value = environ.get(name)
        if not value:
            raise PolicyError(f"{clause}: ${name} is not set", hint="set it, or write $$ for a $ in a name")
        if not done and not value.startswith("/"):
            raise PolicyError(
                f"{clause}: ${name} is not an absolute path but {show(value)}",
                hint=f"set ${name} to an absolute path",
            )
        done += value
    return done + rest
