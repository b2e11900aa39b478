"""`stockade.functions`: its names, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stockade
import stockade.functions


def test_every_name_is_there_and_no_other_one() -> None:
    for name in stockade.functions.__all__:
        assert getattr(stockade.functions, name).__name__ == name
    assert dir(stockade.functions) == sorted(stockade.functions.__all__)
    assert stockade.functions.sandboxed is stockade.sandboxed
    with pytest.raises(AttributeError, match=r"stockade\.functions.*no attribute 'sandbox'"):
        stockade.functions.sandbox  # type: ignore[attr-defined]  # noqa: B018


def test_importing_it_loads_nothing_else() -> None:
    code = "import sys, stockade; before = set(sys.modules); import stockade.functions; "
    code += "print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["stockade.functions", "stockade.lazy"]
