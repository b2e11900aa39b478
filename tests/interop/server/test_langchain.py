"""LangChain's own tests of sandboxes, with its published adapter, against the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_opensandbox import OpenSandboxBackend
from langchain_tests.integration_tests import SandboxIntegrationTests
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync

PATHS = "the suite expects names where deepagents, which answers them, has had absolute paths since 0.7"


class TestLangChain(SandboxIntegrationTests):
    """The standard suite. The adapter joins lines with newlines, as SDKs before 1.1.1 need it."""

    @pytest.fixture(scope="class")
    def sandbox(self, connection: ConnectionConfigSync) -> Iterator[OpenSandboxBackend]:
        box = SandboxSync.create(
            "host",
            connection_config=connection,
            extensions={"stockade.line-endings": "cut"},
        )
        yield OpenSandboxBackend(sandbox=box, timeout=60)
        box.destroy()

    @pytest.mark.xfail(reason=PATHS, strict=True)
    def test_glob(self, sandbox_backend: OpenSandboxBackend, sandbox_test_root: str) -> None:
        super().test_glob(sandbox_backend, sandbox_test_root)

    @pytest.mark.xfail(reason=PATHS, strict=True)
    def test_glob_basic_pattern(self, sandbox_backend: OpenSandboxBackend, sandbox_test_root: str) -> None:
        super().test_glob_basic_pattern(sandbox_backend, sandbox_test_root)

    @pytest.mark.xfail(reason=PATHS, strict=True)
    def test_glob_with_directories(self, sandbox_backend: OpenSandboxBackend, sandbox_test_root: str) -> None:
        super().test_glob_with_directories(sandbox_backend, sandbox_test_root)

    @pytest.mark.xfail(reason=PATHS, strict=True)
    def test_glob_hidden_files_explicitly(
        self, sandbox_backend: OpenSandboxBackend, sandbox_test_root: str
    ) -> None:
        super().test_glob_hidden_files_explicitly(sandbox_backend, sandbox_test_root)

    @pytest.mark.xfail(reason=PATHS, strict=True)
    def test_glob_with_character_class(
        self, sandbox_backend: OpenSandboxBackend, sandbox_test_root: str
    ) -> None:
        super().test_glob_with_character_class(sandbox_backend, sandbox_test_root)

    @pytest.mark.xfail(reason=PATHS, strict=True)
    def test_glob_with_question_mark(
        self, sandbox_backend: OpenSandboxBackend, sandbox_test_root: str
    ) -> None:
        super().test_glob_with_question_mark(sandbox_backend, sandbox_test_root)
