"""The OpenAPI description of the server: both planes in one document, generated from the handlers.

The framework describes each application by itself, and describes errors as its own. Here the endpoints of a
sandbox get the paths at which clients reach them, and every error gets the body that it really has.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Litestar
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.types import ControllerRouterHandler

from stockade._version import __version__
from stockade.server.isolated.controller import ARCHIVE, PATCH_TYPE, ChangeLists
from stockade.server.supervisor.app import PLANES, SupervisorApp

TITLE = "Stockade"
DESCRIPTION = (
    "Sandboxes and isolated sessions over HTTP, in the wire contract of OpenSandbox. Calls to endpoints of "
    "a sandbox take its token or its owner's key."
)
#: The statuses that the framework describes in its own way.
FRAMEWORK_ERRORS = ("400", "500")
ERROR_BODY = {
    "type": "object",
    "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
    "required": ["code", "message"],
}
ERROR = {
    "description": "an error: a code and one sentence",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
KEY, TOKEN = "key", "token"
#: What the server gives its handlers, and no client sends.
GIVEN = ("owner", "table", "factory", "telemetry")
SCHEMES = {
    KEY: {"type": "apiKey", "in": "header", "name": "OPEN-SANDBOX-API-KEY"},
    TOKEN: {"type": "apiKey", "in": "header", "name": "X-EXECD-ACCESS-TOKEN"},
}
#: Fields of a create that this version refuses.
REFUSED = ("snapshotId", "templateId", "volumes", "credentialProxy", "lifecycle")
#: What answers that are no JSON consist of, by the end of their path; all other such answers are empty. A
#: DELETE answers with nothing or with JSON.
EVENTS = ("text/event-stream",)
CHANGE_LIST = "application/json"
STREAMS = {
    **dict.fromkeys(("/command", "/run", "/code", "/metrics/watch"), EVENTS),
    "/metrics": ("text/plain",),
    "/download": ("application/octet-stream", "text/plain"),
    "/logs": ("text/plain",),
    "/diff": (ARCHIVE, CHANGE_LIST, PATCH_TYPE),
    "/receipts/{receipt}": ("application/json",),
}
#: How names of schemas become references to them.
REFERENCE = "#/components/schemas/{name}"
#: The body of an upload, which its handler reads by itself, as it arrives.
PARTS = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
UPLOAD_BODY = {
    "description": "for each file a part `metadata`, a file of JSON with path, mode, owner and group, and "
    "then a part `file` with the content",
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"metadata": PARTS, "file": PARTS},
                "required": ["metadata", "file"],
            }
        }
    },
}
SANDBOX = {"name": "sandbox_id", "in": "path", "required": True, "schema": {"type": "string"}}


def config() -> OpenAPIConfig:
    """Return how the framework describes an application."""
    return OpenAPIConfig(
        title=TITLE,
        version=__version__,
        description=DESCRIPTION,
        use_handler_docstrings=True,
        path="/.schema",
    )


def describe(controllers: list[ControllerRouterHandler], open_paths: frozenset[str]) -> dict[str, Any]:
    """Return the description of the server's own calls and of the endpoints of its sandboxes."""
    # Only the names matter here; each needs a provider of its own.
    given = {name: Provide(lambda: None, sync_to_thread=False) for name in GIVEN}
    own = Litestar(controllers, dependencies=given, openapi_config=config()).openapi_schema.to_schema()
    inner = SupervisorApp(config()).litestar.openapi_schema.to_schema()
    paths = {}
    for path, item in own["paths"].items():
        if not path.startswith("/.schema"):
            paths[path] = _operations(path, item, [] if path in open_paths else [{KEY: []}], "")
    for path, item in inner["paths"].items():
        for port, plane in PLANES.items():
            if path == plane or path.startswith(f"{plane}/"):
                shown = f"/sandboxes/{{sandbox_id}}/proxy/{port}{path.removeprefix(plane)}"
                paths[shown] = _operations(path, item, [{TOKEN: []}, {KEY: []}], f"port {port}: ")
    for name in REFUSED:
        own["components"]["schemas"]["CreateRequest"]["properties"].pop(name)
    lists = msgspec.json.schema_components((ChangeLists,), ref_template=REFERENCE)[1]
    schemas = {**lists, **_schemas(inner), **_schemas(own), "Error": ERROR_BODY}
    whole = {
        "openapi": own["openapi"],
        "info": own["info"],
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SCHEMES},
    }
    found: dict[str, Any] = msgspec.to_builtins(whole)  # defaults may be values of ours
    return found


def _schemas(description: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = description.get("components", {}).get("schemas", {})
    return found


def _real_answer(path: str, method: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Describe an answer that is not JSON; the framework takes one for a text in JSON."""
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    if schema.get("type") not in (None, "string") or "$ref" in schema or "oneOf" in schema:
        return answer
    for end, kinds in STREAMS.items() if method != "delete" else ():
        if path.endswith(end):
            return {**answer, "content": {kind: {"schema": _content(end, kind)} for kind in kinds}}
    return {name: value for name, value in answer.items() if name != "content"}


def _content(end: str, kind: str) -> dict[str, str]:
    if end == "/diff" and kind == CHANGE_LIST:
        return {"$ref": REFERENCE.format(name=ChangeLists.__name__)}
    return {"type": "object" if kind == "application/json" else "string"}


def _is_needed(path: str, method: str, name: str) -> bool:
    """Whether a call is refused without a parameter of the query that its handler reads by itself."""
    if name == "path":
        return "/files" in path or "/directories" in path
    return method == "delete" and name in ("id", "language")


def _operations(
    path: str, item: dict[str, Any], security: list[dict[str, Any]], prefix: str
) -> dict[str, Any]:
    """Return the calls of one path, with the errors that they really have, and who may make them."""
    found: dict[str, Any] = {}
    for method, operation in item.items():
        responses = {
            status: answer
            for status, answer in operation.get("responses", {}).items()
            if status not in FRAMEWORK_ERRORS
        }
        responses = {status: _real_answer(path, method, answer) for status, answer in responses.items()}
        if path.endswith("/download"):
            responses["206"] = {**responses["200"], "description": "the bytes that `Range` names"}
        changed = {**operation, "responses": {**responses, "default": ERROR}, "security": security}
        if path.endswith("/upload"):
            changed["requestBody"] = UPLOAD_BODY
        if prefix:
            given = [
                {**one, "required": True} if _is_needed(path, method, one["name"]) else one
                for one in operation.get("parameters", ())
            ]
            changed["parameters"] = [SANDBOX, *given]
            changed["operationId"] = f"{prefix.partition(':')[0].replace(' ', '')}_{operation['operationId']}"
        found[method] = changed
    return found
