"""The APIs of three models, as far as their agents need them: run one command, then say that it is done.

`command` is what the model wants to have run. Each function answers the requests
for one host of the small internet; see `Internet.handle`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from support.internet_web import Request, Response

DONE = "All done."
#: The tool of Claude Code that waits for MCP servers, and how often the model uses it at most.
WAIT, MOST_WAITS = "WaitForMcpServers", 10
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def task(request: Request, key: str) -> Response:
    """What `support/agent.py` asks; it needs no model."""
    names = ("x-api-key", "x-goog-api-key", "authorization")
    given = [request.headers.get(name, "").removeprefix("Bearer ") for name in names]
    return Response(b"fix it\n" if key in given else b"who are you\n")


def messages(
    request: Request, command: str, key: str, tool: str = "Bash", arguments: dict[str, Any] | None = None
) -> Response:
    """Anthropic's Messages API. The model uses `tool` once, with the command or with other arguments."""
    if request.path != "/v1/messages" or request.method != "POST":
        return _json({"type": "error", "error": {"type": "not_found_error", "message": request.path}}, 404)
    if request.headers.get("x-api-key") != key:
        return _json({"type": "error", "error": {"type": "authentication_error", "message": "no key"}}, 401)
    asked = json.loads(request.body)
    told = json.dumps(asked.get("messages", []))
    tools = {tool.get("name") for tool in asked.get("tools") or ()}
    block: dict[str, Any]
    use = arguments or {"command": command, "description": "Do the work"}
    if tool not in tools and WAIT in tools and told.count('"tool_result"') < MOST_WAITS:
        tool, use = WAIT, {}
    number = f"toolu_{told.count('tool_result')}"
    if tool in tools and (tool == WAIT or told.count(f'"name": "{tool}"') == 0):
        block = {"type": "tool_use", "id": number, "name": tool, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(use)}
        stop = "tool_use"
    else:
        block = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": DONE}
        stop = "end_turn"
    usage = {"input_tokens": 10, "output_tokens": 5}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": asked.get("model", "claude"),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    if not asked.get("stream"):
        content = {**block, "text": DONE} if block["type"] == "text" else {**block, "input": use}
        return _json({**message, "content": [content], "stop_reason": stop})
    return _events(
        [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": stop, "stop_sequence": None},
                "usage": {"output_tokens": 5},
            },
            {"type": "message_stop"},
        ]
    )


def responses(request: Request, command: str, key: str) -> Response:
    """OpenAI's Responses API."""
    if request.headers.get("authorization") != f"Bearer {key}":
        return _json({"error": {"message": "no key", "type": "invalid_request_error"}}, 401)
    if request.headers.get("upgrade", "").lower() == "websocket":
        # Codex then takes HTTP at once.
        return _json({"error": {"message": "no WebSocket here", "type": "invalid_request_error"}}, 426)
    if request.path != "/v1/responses" or request.method != "POST":
        return _json({"error": {"message": request.path, "type": "invalid_request_error"}}, 404)
    asked = json.loads(request.body)
    item: dict[str, Any]
    if '"function_call_output"' not in json.dumps(asked.get("input", [])):
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", **_shell_call(asked, command)}
    else:
        content = [{"type": "output_text", "text": DONE, "annotations": []}]
        item = {"type": "message", "id": "msg_1", "role": "assistant", "content": content}
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }
    return _events(
        [
            {"type": "response.created", "response": {"id": "resp_1"}},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": {"id": "resp_1", "usage": usage, "output": []}},
        ]
    )


def _shell_call(asked: dict[str, Any], command: str) -> dict[str, str]:
    """Call the tool that runs commands by the name and with the arguments that this version gives it."""
    for tool in asked.get("tools", ()):
        wanted = tool.get("parameters", {}).get("properties", {})
        if "cmd" in wanted:
            return {"name": tool["name"], "arguments": json.dumps({"cmd": command})}
        if "command" in wanted:
            words: Any = ["sh", "-c", command] if wanted["command"].get("type") == "array" else command
            return {"name": tool["name"], "arguments": json.dumps({"command": words})}
    raise ValueError(f"no tool runs commands: {[tool.get('name') for tool in asked.get('tools', ())]}")


def generate_content(request: Request, command: str, key: str) -> Response:
    """Google's Gemini API."""
    if request.headers.get("x-goog-api-key") != key and request.query.get("key") != key:
        return _json({"error": {"code": 401, "message": "no key", "status": "UNAUTHENTICATED"}}, 401)
    asked = json.loads(request.body or b"{}")
    tools = json.dumps(asked.get("tools", []))
    part: dict[str, Any] = {"text": DONE}
    if "run_shell_command" in tools and '"functionResponse"' not in json.dumps(asked):
        part = {"functionCall": {"name": "run_shell_command", "args": {"command": command}}}
    answer = {
        "candidates": [{"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}],
        "usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15},
    }
    if "stream" in request.path:
        return Response(headers=_STREAM, stream=_pieces([f"data: {json.dumps(answer)}\r\n\r\n"]))
    return _json(answer)


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, {"Content-Type": "application/json"})


def _events(events: list[dict[str, Any]]) -> Response:
    texts = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
    return Response(headers=_STREAM, stream=_pieces(texts))


async def _pieces(texts: list[str]) -> AsyncIterator[bytes]:
    for text in texts:
        yield text.encode()


def refuse(request: Request, status: int, answer: dict[str, Any], after: str = "") -> Response:
    """Any of them when it refuses: with this status and answer, and with Retry-After if it is given."""
    refused = _json(answer, status)
    if after:
        refused.headers["Retry-After"] = after
    return refused


#: How many requests `scripted` has refused, by scene.
_refused: dict[str, int] = {}


def scripted(
    request: Request, script: list[list[str]], key: str, scene: str = "", limited: int = 0
) -> Response:
    """Anthropic's Messages API with a model that does what the first matching line of a script says.

    The first `limited` requests for work are refused with 429; `scene` tells which were counted.
    """
    told = request.body.decode("utf-8", "replace")
    if '"Bash"' in told and _refused.get(scene, 0) < limited:
        _refused[scene] = _refused.get(scene, 0) + 1
        error = {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}
        return _json(error, 429)
    return messages(request, next((command for words, command in script if words in told), "true"), key)
