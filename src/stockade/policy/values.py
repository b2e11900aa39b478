"""The plain values of a policy: how each is read, refused and written back.

Every check takes the dotted key and what was written, and returns the one
form that Stockade keeps. What it cannot keep it refuses as `Invalid`, which
remembers the key and the value so that a loader can add file and line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from stockade.errors import PolicyError

TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LONGEST = 366 * 86400.0

Check = Callable[[str, Any], Any]


class Invalid(PolicyError):
    """One key of a policy holds what it cannot hold."""

    def __init__(self, key: str, value: object, problem: str, hint: str = "") -> None:
        super().__init__(f"{key} = {show(value)}: {problem}" if value is not None else f"{key}: {problem}")
        self.hint = hint
        self.key = key
        self.value = value


class FrozenMap(dict[str, str]):
    """A mapping that can be part of a hashable value; kept sorted, so equal maps print alike."""

    def __init__(self, items: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(sorted(dict(items).items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, str]]]:
        return FrozenMap, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a policy does not change; make another one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse


def nearest(word: str, known: Iterable[str], before: str = "") -> str:
    """The hint for a name that does not exist: the one that was probably meant."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {before}{near[0]}?"
    return f"known: {', '.join(names)}" if len(names) < 32 else ""


def quote(text: str) -> str:
    """A TOML basic string."""
    return '"' + text.translate(_ESCAPES) + '"'


_ESCAPES = {n: f"\\u{n:04x}" for n in (*range(32), 127)} | {ord('"'): '\\"', ord("\\"): "\\\\"}


def render(value: object) -> str:
    """A value as TOML writes it."""
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
    """A value in a message: as TOML, and never longer than a line."""
    text = render(value)
    return text if len(text) <= 80 else text[:77] + "..."


def time_text(seconds: float) -> str:
    """Seconds in the largest unit that keeps the number whole."""
    for unit in ("h", "m", "s", "ms"):
        count = seconds / TIME_UNITS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{seconds!r}s"


def time(key: str, value: Any) -> float | None:
    """Seconds, from a number or from text such as "250ms", "30s", "5m", "1h"."""
    hint = 'write seconds, or "250ms", "30s", "5m", "1h"'
    if value is None:
        return None
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str):
        digits = value.rstrip("hms")
        number = _number(digits)
        if number is not None:
            unit = TIME_UNITS.get(value[len(digits) :] or "s")
            number = number * unit if unit else None
    if number is None:
        raise Invalid(key, value, "is not a time", hint)
    # A NaN fails both comparisons, so the test is written for what is allowed.
    if not 0.001 <= number <= LONGEST:
        raise Invalid(key, value, "a time is between 1ms and 366 days", hint)
    return float(number)


def size(key: str, value: Any) -> int | None:
    """Bytes, from a whole number or from text such as "64K", "10M", "1G"."""
    hint = 'write bytes, or "64K", "10M", "1G"'
    if value is None:
        return None
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value:
        unit = SIZE_UNITS.get(value[-1], 1)
        digits = value[:-1] if unit > 1 else value
        number = int(digits) * unit if _whole(digits) else None
    if number is None:
        raise Invalid(key, value, "is not a size", hint)
    if not 1 <= number < 1 << 63:
        raise Invalid(key, value, "a size is at least one byte and fits 63 bits", hint)
    return number


def size_from(least: int) -> Check:
    """A check for sizes of at least so many bytes."""

    def check(key: str, value: Any) -> int | None:
        number = size(key, value)
        if number is not None and number < least:
            raise Invalid(key, value, f"must be at least {size_text(least)}")
        return number

    return check


def size_text(number: int) -> str:
    """Bytes in the largest unit that keeps the number whole."""
    units = [(count, unit) for unit, count in SIZE_UNITS.items() if number % count == 0]
    count, unit = max(units, default=(1, ""))
    return f"{number // count}{unit}"


def cores(key: str, value: Any) -> float | None:
    """A share of the processors, as a number of cores; the kernel gives no less than a hundredth."""
    if value is None:
        return None
    number = _number(value) if isinstance(value, str) else value
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise Invalid(key, value, "is not a number of cores", "write a number such as 0.5 or 2")
    # A NaN fails both comparisons, so the test is written for what is allowed.
    if not 0.01 <= number <= 1024:
        raise Invalid(key, value, "must be between 0.01 and 1024 cores")
    return float(number)


def count(most: int, least: int = 1) -> Check:
    """A check for whole numbers from `least` to `most`; digits as text serve the command line."""

    def check(key: str, value: Any) -> int | None:
        if value is None:
            return None
        number = int(value) if isinstance(value, str) and _whole(value) else value
        if not isinstance(number, int) or isinstance(number, bool):
            raise Invalid(key, value, "is not a whole number", "write a number such as 64")
        if not least <= number <= most:
            raise Invalid(key, value, f"must be between {least} and {most}")
        return number

    return check


def flag(key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise Invalid(key, value, "must be true or false")
    return value


def one_of(*names: str, later: Iterable[str] = ()) -> Check:
    """A check for one of a few words; `later` are words this version knows but does not serve."""

    def check(key: str, value: Any) -> str:
        if value in later:
            raise Invalid(key, value, "this version does not have it", f"known: {', '.join(names)}")
        if not isinstance(value, str) or value not in names:
            raise Invalid(key, value, f"is not a known {key.rpartition('.')[2]}", nearest(str(value), names))
        return str(value)

    return check


def many(check: Check) -> Check:
    """A check for a list whose items all pass `check`: a tuple without repetitions."""

    def check_all(key: str, value: Any) -> tuple[Any, ...]:
        if value == ():
            return ()
        if not isinstance(value, list | tuple | set | frozenset):
            raise Invalid(key, value, "must be a list", f"write {key} = [{show(value)}]")
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return tuple(dict.fromkeys(check(key, item) for item in items))

    return check_all


def path(key: str, value: Any) -> str:
    """A path as it was written; where it leads is for `resolve` to find out."""
    text = str(_plain(key, value, "a path"))
    if text.startswith("~") and text[1:2] not in ("", "/", "?"):
        raise Invalid(key, value, "only ~ and ~/... stand for a home", f"write ./{text} for that name")
    down = False
    for part in text.split("/"):
        if part == ".." and (down or text.startswith("/")):
            raise Invalid(key, value, "has a .. after a name, which a link would turn elsewhere")
        down = down or part not in ("", ".", "..")
    return text


def literal(name: str) -> str:
    """A file name as a policy's path: a $ in it stands for itself."""
    return name.replace("$", "$$")


def grant(key: str, value: Any) -> str:
    """A path that may end in ? for "if it exists"."""
    text = path(key, value)
    if text == "?":
        raise Invalid(key, value, "is empty")
    return text


def denied(key: str, value: Any) -> str:
    """A path that is to be hidden, whether it exists or not."""
    text = path(key, value)
    if text.endswith("?"):
        raise Invalid(key, value, "a denied path need not exist", "leave the ? out")
    return text


def inside(key: str, value: Any) -> str:
    """A relative path that stays below the workspace."""
    text = _plain(key, value, "a path")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if text.startswith(("/", "~")) or ".." in parts or not parts:
        raise Invalid(key, value, "must be a relative path inside the workspace, without ..")
    return "/".join(parts)


def variable(key: str, value: Any) -> str:
    """The name of an environment variable."""
    name = _plain(key, value, "a variable's name")
    if "=" in name:
        raise Invalid(key, value, "a variable's name has no =")
    return name


def variables(key: str, value: Any) -> FrozenMap:
    """Names and values of environment variables."""
    if type(value) is FrozenMap:
        return value
    if not isinstance(value, Mapping):
        raise Invalid(key, value, "must be a table", f'write {key} = {{ NAME = "value" }}')
    for name, text in value.items():
        variable(key, name)
        if not isinstance(text, str) or "\0" in text:
            raise Invalid(f"{key}.{name}", text, "must be text without NUL", f'write {name} = "{text}"')
    return FrozenMap(value)


def command(key: str, value: Any) -> str:
    """A command by its name or path."""
    return _plain(key, value, "a command")


def syscall(key: str, value: Any) -> str:
    """The name of a system call that this machine's filter compiler knows."""
    name = _plain(key, value, "a system call's name")
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError):  # no libseccomp here: then no filter is compiled here either
        return name
    if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) == -1:
        raise Invalid(key, value, "is not a system call", nearest(name, _syscalls()))
    return name


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
        raise Invalid(key, value, f"must be {what} as text")
    if not text:
        raise Invalid(key, value, "is empty")
    if "\0" in text:
        raise Invalid(key, value, "has a NUL byte in it")
    return text


def _whole(text: str) -> bool:
    # isdigit() alone takes digits of other scripts, and int() underscores and signs;
    # the length keeps int() away from its own limit, and from work.
    return text.isascii() and text.isdigit() and len(text) <= 19


def _number(text: str) -> float | None:
    head, dot, tail = text.partition(".")
    good = _whole(head) and (not dot or _whole(tail))
    return float(text) if good else None
