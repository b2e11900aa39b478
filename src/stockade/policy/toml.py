"""Read and write policies as TOML, and find the line of a mistake."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.linux.path_lookup import counted, covers, look_up, names_on_the_way
from stockade.policy.model import PROFILES, Policy
from stockade.policy.values import InvalidValueError, expand, literal, quote_protected, render, show

#: Our table in a pyproject.toml.
SECTION = ("tool", "stockade")
PYPROJECT = "pyproject.toml"
#: The most bytes of a policy file.
LARGEST = 1 << 20
#: A table of the user's own file that is not part of a policy, unlike the clause of that name.
RECEIPTS = "receipts"
#: A table beside a policy that says what `stockade loop` does; it widens no policy.
LOOP = "loop"

#: How many steps decoding may take: a tenth of a second.
MOST_STEPS = 10_000_000


def parse(
    text: str,
    *,
    base: str | None = None,
    name: str = "",
    section: tuple[str, ...] = (),
    besides: tuple[str, ...] = (),
) -> Policy:
    """Parse a policy; the tables that `besides` names are not part of it.

    >>> parse('workspace = "src"', base="/project").workspace.path  # the dot marks what it is relative to
    '/project/./src'
    """
    table = clauses(text, base=base, name=name, section=section, besides=besides, required=True)
    return Policy(**anchored(table, base))


def clauses(
    text: str,
    *,
    base: str | None = None,
    name: str = "",
    section: tuple[str, ...] = (),
    besides: tuple[str, ...] = (),
    required: bool = False,
) -> dict[str, Any]:
    """Parse and check the clauses that `text` writes, without defaults; paths are relative to `base`.

    `section` is the table that holds them; a text without it is an error if `required`, and has no clauses
    otherwise. `besides` are tables that hold no clause. The result can be merged into another policy.
    """
    table: Any = decode(text, name)
    for part in section:
        if required and isinstance(table, dict) and part not in table:
            header = f"[{'.'.join(section)}]"
            raise PolicyError(f"{name} has no {header}", hint=f"write the clauses below {header}")
        table = table.get(part, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise PolicyError(f"{name}: {'.'.join(section)} must be a table")
    table = {
        key: value
        for key, value in table.items()
        if key != LOOP and not (key in besides and isinstance(value, dict))
    }
    try:
        return check_clauses(table, base)
    except InvalidValueError as error:
        raise located(error, text, name, section) from None


def check_clauses(table: dict[str, Any], base: str | None) -> dict[str, Any]:
    """Check the clauses of a decoded table; their paths become relative to `base`."""
    if isinstance(table.get("workspace"), str):
        table = {**table, "workspace": {"path": table["workspace"]}}
    checked = Policy(**table).table(full=True)
    found = {
        key: {part: value[part] for part in table[key] if part in value} if isinstance(value, dict) else value
        for key, value in checked.items()
        if key in table
    }
    if base is not None:
        for key in ("read", "write", "exec"):  # `deny` is relative to the workspace
            if key in found:
                found[key] = [rebase(path, base) for path in found[key]]
        for secret in found.get("secrets", {}).values():
            if "from_file" in secret:
                secret["from_file"] = rebase(secret["from_file"], base)
        if "path" in found.get("workspace", ()):
            found["workspace"]["path"] = rebase(found["workspace"]["path"], base)
    return found


def located(error: InvalidValueError, text: str, name: str, section: tuple[str, ...]) -> PolicyError:
    """Return the error with the file and the line that it is about."""
    key = error.key.partition("[")[0]  # net[2] is the third rule of net
    line = line_of(text, (*section, *key.split(".")), error.value)
    where = f"{name or 'line'}:{line}: " if line else f"{name}: " if name else ""
    return PolicyError(where + error.message, hint=error.hint)


def anchored(table: dict[str, Any], base: str | None) -> dict[str, Any]:
    """Give a workspace without a path the directory of the file."""
    if "workspace" in table:
        return {**table, "workspace": {"path": literal(base or "."), **table["workspace"]}}
    return table


def rebase(path: str, base: str) -> str:
    """Make a relative path relative to `base`; ~ and $ stay until the user is known."""
    return path if path.startswith(("/", "~", "$")) else counted(path, literal(base))


def decode(text: str, name: str) -> dict[str, Any]:
    """Parse TOML. A program may have written the text, so the time that parsing takes is bounded."""
    import tomllib

    # A key of n parts takes tomllib n × n steps: 15 seconds for one of 64 KiB.
    if sum(line.count(".") ** 2 for line in text.splitlines()) > MOST_STEPS:
        raise PolicyError(
            f"{name or 'the policy'} has lines with too many dots for a policy",
            hint="split long dotted keys into tables",
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        hint = 'write text in quotes and lists in brackets: read = ["/opt/data"]'
        if "overwrite" in str(error) or "twice" in str(error):
            hint = 'write each key and each table once, with all values in one list: read = ["/a", "/b"]'
        raise PolicyError(
            f"{name or 'the policy'} is not TOML: {error or 'nested too deeply'}", hint=hint
        ) from None


def write(table: Mapping[str, Any]) -> str:
    """Write a policy's clauses as TOML: plain keys first, then the tables."""
    nested = [name for name, value in table.items() if isinstance(value, Mapping) and name != "env"]
    lines = [f"{name} = {render(value)}" for name, value in table.items() if name not in nested]
    for name in nested:
        # Secrets are tables in a table.
        inner = {f"{name}.{key}": value for key, value in table[name].items()} if name == "secrets" else {}
        for header, clauses in (inner or {name: table[name]}).items():
            lines += ["", f"[{header}]", *(f"{key} = {render(value)}" for key, value in clauses.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def line_of(text: str, key: tuple[str, ...], value: object) -> int:
    """Find the line that writes the key, or its item `value` where a list spans lines; 0 if not found.

    It reads lines, not TOML, because it serves messages only.
    """
    lines = text.splitlines()
    table: tuple[str, ...] = ()
    found = 0
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        if bare.startswith("["):
            table = names = _names(bare.partition("]")[0].strip("["))
        elif "=" in bare and not bare.startswith("#"):
            names = table + _names(bare.partition("=")[0])
        else:
            continue
        if names[: len(key)] == key:
            found = number
            break
        # An inline table has the key on the line of its parent, and a secret that lacks one its header.
        of_secret = len(names) == len(key) - 1 and "secrets" in key
        if names == key[: len(names)] and not found and (of_secret or not bare.startswith("[")):
            found = number
    if found and isinstance(value, str) and value and "]" not in lines[found - 1]:
        for number in range(found, len(lines)):
            if value in lines[number]:
                return number + 1
            if "]" in lines[number]:
                break
    return found


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def refuse_what_is_no_file(path: str) -> None:
    """Refuse text that a caller passed as the path of a policy file but meant as something else."""
    if "\n" in path or ("=" in path and not os.path.lexists(path)):
        raise PolicyError(
            "the policy is text, and a call takes the path of a file", hint="write Policy.from_toml(text)"
        )
    if os.path.isdir(path):
        raise PolicyError(
            f"{path} is a directory, and not a policy file",
            hint=f"to work in it, write Policy(workspace={path!r})",
        )
    if path in PROFILES and not os.path.lexists(path):
        raise PolicyError(
            f"there is no policy file {path!r}", hint=f"{path} is a profile: write Policy(profile={path!r})"
        )


def read_file(path: str) -> bytes:
    """Read a policy file, which must be a regular file of at most `LARGEST` bytes. Never blocks."""
    data = read_file_if_any(path)
    if data is not None:
        return data
    from stockade.policy.suggestions import for_file

    raise PolicyError(
        f"cannot read {path}: {os.strerror(errno.ENOENT)}",
        hint=for_file(path) or "check the path; `stockade policy schema` shows what a policy may contain",
    )


def read_file_if_any(path: str) -> bytes | None:
    """Read a policy file as `read_file` does; return None if there is none."""
    try:
        # Opening a pipe would otherwise block until a process writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PolicyError(f"{path} is not a regular file", hint="name a TOML file")
            data = b""
            while len(data) <= LARGEST and (part := os.read(fd, LARGEST + 1 - len(data))):
                data += part
        finally:
            os.close(fd)
    except FileNotFoundError:
        if not os.path.islink(path):
            return None
        raise PolicyError(
            f"cannot read {path}: it is a link to {os.readlink(path)}, which is not there",
            hint="make what it leads to, or remove the link",
        ) from None
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > LARGEST:
        raise PolicyError(f"{path} is larger than {LARGEST >> 20} MiB", hint="a policy is a few lines")
    return data


def text_of(data: bytes, path: str) -> str:
    """Decode the text of a policy file."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise PolicyError(f"{path} is not UTF-8 text") from None


def load(path: str, *, besides: tuple[str, ...] = (), hash: str = "") -> Policy:
    """Load the policy of a file; its paths are relative to the file's directory.

    With `hash`, the SHA-256 of its bytes, a file with any other content is refused.
    """
    base = directory_of(path)
    section = SECTION if os.path.basename(path) == PYPROJECT else ()
    data = read_file(path)
    if hash:
        from stockade.linux.sha256 import sha256

        if sha256(data).hexdigest() != hash:
            raise PolicyError(
                f"{path} has changed since it became the policy of its agent",
                hint="read it; if you agree, run: stockade agents add NAME -p FILE",
            )
    return parse(text_of(data, path), base=base, name=path, section=section, besides=besides)


def directory_of(path: str) -> str:
    """Return the directory of a file, by its real name."""
    return os.path.realpath(os.path.dirname(os.path.abspath(path)))


def protect_source(policy: Policy, file: str, home: str, cwd: str, environ: Mapping[str, str]) -> Policy:
    """Also protect the file that the policy comes from, so that a run cannot change the next one's policy."""
    if policy.workspace is None:
        return policy
    path = policy.workspace.path
    root = (
        look_up(expand(path, f"workspace = {show(path)}", home=home, cwd=cwd, environ=environ)).close().name
    )
    # Its text alone is not enough: `link/../policy.toml` is where the link leads.
    names = names_on_the_way(file if os.path.isabs(file) else f"{os.getcwd()}/{file}")
    inner = [quote_protected(os.path.relpath(path, root)) for path in names if covers(root, path)]
    if not inner:
        return policy
    return msgspec.structs.replace(
        policy,
        protect=(*policy.protect, *inner),
        unprotect=tuple(other for other in policy.unprotect if other not in inner),
    )
