"""Ready-made bindings: for the variable of a service, its hosts and where its key stands in a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from stockade.errors import PolicyError
from stockade.policy.values import nearest


class Service(NamedTuple):
    """Where the key of one service goes."""

    hosts: tuple[str, ...]
    forms: tuple[str, ...] = ("bearer",)
    #: What its keys begin with.
    prefix: str = ""


_ANTHROPIC = ("api.anthropic.com",)
_OPENAI = ("api.openai.com",)
_GEMINI = ("generativelanguage.googleapis.com",)
_GITHUB = ("api.github.com", "github.com", "uploads.github.com")
_GOOGLE_FORMS = ("header:x-goog-api-key", "query:key")

#: By the variable in which programs look for the key.
SERVICES: dict[str, Service] = {
    "ANTHROPIC_API_KEY": Service(_ANTHROPIC, ("header:x-api-key", "bearer"), "sk-ant-api03-"),
    "ANTHROPIC_AUTH_TOKEN": Service(_ANTHROPIC),
    "CLAUDE_CODE_OAUTH_TOKEN": Service(_ANTHROPIC, prefix="sk-ant-oat01-"),
    "CODEX_API_KEY": Service(_OPENAI, prefix="sk-"),
    "OPENAI_API_KEY": Service(_OPENAI, prefix="sk-"),
    "GEMINI_API_KEY": Service(_GEMINI, _GOOGLE_FORMS, "AIza"),
    "GOOGLE_API_KEY": Service(_GEMINI, _GOOGLE_FORMS, "AIza"),
    "GH_TOKEN": Service(_GITHUB, ("bearer", "basic"), "ghp_"),
    "GITHUB_TOKEN": Service(_GITHUB, ("bearer", "basic"), "ghp_"),
    "GITLAB_TOKEN": Service(("gitlab.com",), ("header:private-token", "bearer", "basic"), "glpat-"),
    "COHERE_API_KEY": Service(("api.cohere.com",)),
    "DEEPSEEK_API_KEY": Service(("api.deepseek.com",), prefix="sk-"),
    "GROQ_API_KEY": Service(("api.groq.com",), prefix="gsk_"),
    "HF_TOKEN": Service(("huggingface.co",), ("bearer", "basic"), "hf_"),
    "MISTRAL_API_KEY": Service(("api.mistral.ai",)),
    "NPM_TOKEN": Service(("registry.npmjs.org",), ("bearer", "basic"), "npm_"),
    "OPENROUTER_API_KEY": Service(("openrouter.ai",), prefix="sk-or-v1-"),
    "SLACK_BOT_TOKEN": Service(("slack.com",), prefix="xoxb-"),
    "STRIPE_API_KEY": Service(("api.stripe.com",), ("bearer", "basic"), "sk_"),
    "TWINE_PASSWORD": Service(("upload.pypi.org",), ("basic",), "pypi-"),
    "XAI_API_KEY": Service(("api.x.ai",), prefix="xai-"),
}


def from_words(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the clauses of `--secret NAME@HOST`; the value is in the variable NAME of your environment.

    A known NAME needs no host. Several hosts of one NAME are one secret.
    """
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        name, at, host = word.partition("@")
        service = SERVICES.get(name)
        if not name or (at and not host) or "=" in name:
            # What was written is not shown: it may be a value.
            raise PolicyError("--secret takes NAME@HOST", hint="write --secret API_KEY@api.example.com")
        if not at and service is None:
            near = nearest(name, SERVICES)
            hint = near if near.startswith("did") else f"write --secret {name}@api.example.com"
            raise PolicyError(f"--secret {name:.80}: Stockade does not know its host", hint=hint)
        clauses = found.setdefault(name, {"from_env": name, "hosts": []})
        if service is not None:
            clauses |= {"as": list(service.forms), "prefix": service.prefix}
        clauses["hosts"] += [host] if at else service.hosts if service else ()
    return found
