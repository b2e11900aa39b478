"""Compiles the gate while the package is built; everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path("src", "stockade")
ON_LINUX = sys.platform.startswith("linux")
ELSEWHERE = (
    "stockade: the gate is built on Linux only. Here policies can be written, checked and "
    "compiled to plans; nothing can be run."
)


def gate_build() -> ModuleType:
    """The gate's build module, by its path: the package it belongs to is not installed yet."""
    path = PACKAGE / "gate" / "build.py"
    spec = importlib.util.spec_from_file_location("stockade_gate_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithGate(build_py):
    """Copies the modules, and compiles the gate beside them."""

    def run(self) -> None:
        if not ON_LINUX:
            print(ELSEWHERE, file=sys.stderr)
            super().run()
            return
        build = gate_build()
        try:
            build.compiler()
            super().run()
            build.executable(self.gate_directory() / build.EXECUTABLE)
            build.library(self.gate_directory() / build.LIBRARY)
        except build.BuildError as error:
            raise SystemExit(str(error)) from None

    def gate_directory(self) -> Path:
        """Where the gate goes: into the wheel, or for an editable install into the source tree."""
        package = PACKAGE if self.editable_mode else Path(self.build_lib, "stockade")
        return package / "gate" / "bin"

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        if not ON_LINUX:
            return outputs
        build = gate_build()
        return outputs + [str(self.gate_directory() / name) for name in (build.EXECUTABLE, build.LIBRARY)]


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python: the gate does not use Python's C interface."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return ("py3", "none", platform)


class WithGate(Distribution):
    """Tells setuptools that the package holds machine code and belongs in platlib."""

    def has_ext_modules(self) -> bool:
        return ON_LINUX


setup(distclass=WithGate, cmdclass={"build_py": BuildWithGate, "bdist_wheel": PlatformWheel})
