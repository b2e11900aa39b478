"""What `import stockade` offers, and what it costs."""

from __future__ import annotations

import doctest
import functools
import importlib
import subprocess
import sys

import pytest

import stockade

HEAVY = (
    "argparse",
    "asyncio",
    "cryptography",
    "ctypes",
    "httpx",
    "json",
    "msgspec",
    "pyseccomp",
    "stockade.policy",
    "stockade.sandbox",
    "subprocess",
)


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    """The reference lists the same names: tests/kernel/test_docs.py compares them."""
    assert dir(stockade) == sorted(stockade.__all__)
    places = [stockade, *(importlib.import_module(f"stockade.{room}") for room in stockade._ROOMS)]
    for place in places:
        for name in set(place.__all__) - {"__version__"}:
            text = getattr(place, name).__doc__
            assert text and not text.startswith("str("), f"{place.__name__}.{name}"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Limits", "policy.Limits"),
        ("WarmPython", "functions.WarmPython"),
        ("delegate", "inside.delegate"),
        ("public_key", "receipt.public_key"),
    ],
)
def test_a_name_that_is_not_at_the_top_says_where_it_is(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=f"it is stockade.{place}$"):
        getattr(stockade, name)


def test_the_packages_with_the_other_names_need_no_import_of_their_own() -> None:
    script = "import stockade; print(*(getattr(stockade, name).__name__ for name in stockade._ROOMS))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"stockade.{name}" for name in stockade._ROOMS]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        stockade.nothing  # noqa: B018
    with pytest.raises(ImportError):
        exec("from stockade import nothing")


def test_every_error_is_a_stockade_error_with_a_hint() -> None:
    errors = [getattr(stockade, name) for name in stockade.__all__ if name.endswith("Error")]
    for kind in errors:
        assert issubclass(kind, stockade.StockadeError)
        error = functools.partial(kind, failure="malformed") if kind is stockade.ReceiptError else kind
        assert (error("what", hint="do this").hint, error("what").hint, str(error("what"))) == (
            "do this",
            "",
            "what",
        )


@pytest.mark.parametrize(
    "module",
    [
        "stockade",
        "stockade.sandbox.sandbox",
        "stockade.sandbox.process",
        "stockade.sessions.background",
        "stockade.sessions.interpreter",
        "stockade.sandbox.pool",
        "stockade.sessions.shell",
        "stockade.sandbox.spawner",
        "stockade.sandbox.async_sandbox",
        "stockade.result",
        "stockade.policy.model",
        "stockade.policy.merging",
        "stockade.linux.path_lookup",
        "stockade.sandbox.workspace",
        "stockade.workspace.files.files",
        "stockade.agents.handler",
        "stockade.receipt.statement",
        "stockade.receipt.verify",
        "stockade.receipt.keys",
        "stockade.functions.executor",
        "stockade.functions.sandboxed_function",
        "stockade.linux.secure_buffer",
    ],
)
def test_the_examples_in_the_documentation_are_true(module: str) -> None:
    done = doctest.testmod(importlib.import_module(module))
    assert done.attempted > 0 and done.failed == 0


def loaded_by(statement: str) -> set[str]:
    """What a fresh interpreter has loaded after the statement and had not before."""
    script = f"import sys; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_it_loads_nothing_heavy() -> None:
    loaded = loaded_by("import stockade")
    assert {name for name in loaded if name.startswith(HEAVY)} == set()


def test_the_command_line_loads_nothing_heavy_before_it_knows_the_command() -> None:
    loaded = loaded_by("import stockade.cli")
    assert {name for name in loaded if name.startswith(HEAVY)} == set()


def test_a_run_never_loads_what_only_others_need() -> None:
    loaded = loaded_by("import stockade; stockade.run(['true'])")
    never = ("asyncio", "cryptography", "argparse", "http", "ssl", "email", "logging", "concurrent")
    assert {name for name in loaded if name.split(".")[0] in never} == set()
