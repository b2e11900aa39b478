"""Git's configuration, read as git reads it, by somebody who must not run git."""

from __future__ import annotations

import time

import pytest

from stockade.workspace.version_control.git_config import LARGEST, parse

KNOWN = {
    "[core]\n\thooksPath = .githooks\n": [("core.hookspath", ".githooks")],
    "[CORE] editor=vim": [("core.editor", "vim")],
    '[remote "Big One"]\nurl = x # why\n': [("remote.Big One.url", "x")],
    "[a.B]\nk\n": [("a.b.k", "true")],
    '[alias]\nst = "!sh -c \\"x # y\\"" ; comment\n': [("alias.st", '!sh -c "x # y"')],
    "[a]\nk = one\\\n  two\n": [("a.k", "one  two")],
    "[a]\nk = v # ends in \\\nl = w\n": [("a.k", "v"), ("a.l", "w")],
    '[a]\nk = "unfinished\nl = w\n': [("a.k", "unfinished"), ("a.l", "w")],
    "[a]\n=bad\n1bad = x\nk! = x\ngood = y\n": [("a.good", "y")],
    "[a\nk = v\n": [("a.k", "v")],
    '[a "s\\"q"]\r\nk = v\r\n': [('a.s"q.k', "v")],
    "\ufeff[a]\nk = v": [("a.k", "v")],
    "": [],
}


@pytest.mark.parametrize("text", KNOWN)
def test_it_is_read(text: str) -> None:
    assert [(one.name, one.value) for one in parse(text.encode())] == KNOWN[text]


@pytest.mark.parametrize(
    "part", [b"x ", b'"', b"\\\n", b"[", b'["', b"[a]", b"k=v\n", b"#", b"\0", b"\xff", b"=", b"a"]
)
def test_the_largest_file_is_read_in_a_moment(part: bytes) -> None:
    began = time.process_time()
    parse(b"[a]\nk = " + part * (LARGEST // len(part)))
    parse(b'[a "' + part * (LARGEST // len(part)))
    assert time.process_time() - began < 20
