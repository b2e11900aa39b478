"""What a program tried to do, as a value: one access, and whether it succeeded."""

from __future__ import annotations

import enum

import msgspec


class Action(enum.StrEnum):
    """What an access wanted. Compares equal to its name."""

    READ = "read"
    #: Writing to a file that exists.
    WRITE = "write"
    #: Making a file, directory or link.
    CREATE = "create"
    REMOVE = "remove"
    #: Renaming or linking: `Access.target` is the old name, `Access.other` the new one.
    RENAME = "rename"
    EXECUTE = "execute"
    CONNECT = "connect"
    BIND = "bind"
    MOUNT = "mount"
    #: A system call that the filter refuses, or an option of a socket.
    CALL = "call"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a program tried, and how often.

    The program chose the text of `target` and `other`: clean it before it reaches a terminal.
    """

    action: Action
    #: An absolute path inside, `HOST:PORT`, `udp://HOST:PORT`, `unix:PATH`, or the name of a system call or
    #: a socket option.
    target: str
    other: str = ""
    #: The executable that tried it, as a path inside; "" if it is not known.
    program: str = ""
    #: The error number that the program got; 0 if the access succeeded.
    error: int = 0
    count: int = 1
