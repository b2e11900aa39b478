"""The published `opensandbox-mcp`, unmodified, over its standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client


def test_an_agent_makes_a_sandbox_and_works_in_it(address: tuple[str, str]) -> None:
    domain, key = address
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "opensandbox_mcp", "--domain", domain, "--api-key", key],
        env={**os.environ, "OPENSANDBOX_DISABLE_METRICS": "1"},
    )

    async def main() -> None:
        async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
            await session.initialize()

            async def call(tool: str, **arguments: Any) -> Any:
                answer = await session.call_tool(tool, arguments)
                assert not answer.is_error, answer
                return answer.structured_content

            made = await call("sandbox_create", image="host")
            box = {"sandbox_id": made["sandbox_id"]}
            try:
                done = await call("command_run", command="echo hello", **box)
                assert "hello" in json.dumps(done)
                await call("file_write", path="/tmp/a", content="by an agent", **box)
                assert "by an agent" in json.dumps(await call("file_read", path="/tmp/a", **box))
                found = await call("file_search", path="/tmp", pattern="a", **box)
                assert "/tmp/a" in json.dumps(found)
                assert box["sandbox_id"] in json.dumps(await call("sandbox_list"))
                await call("sandbox_get_metrics", **box)
                await call("sandbox_healthcheck", **box)
            finally:
                await call("sandbox_kill", **box)

    asyncio.run(main())
