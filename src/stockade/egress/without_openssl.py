"""Keeps asyncio from loading OpenSSL; the egress template loads this first, and nothing else does.

asyncio would load it for TLS connections of its own, but the egress process speaks no TLS. Without it, a
template loads in five sixths of the time, and a copy has less to share and to copy.
"""

from __future__ import annotations

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules
_modules.setdefault("ssl", None)
