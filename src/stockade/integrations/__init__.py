"""Faces for other programs, one module or folder each; each needs the extra of its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Say which extra of the package has a module that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        error.add_note(f"hint: pip install 'stockade[{name}]'")
        raise
