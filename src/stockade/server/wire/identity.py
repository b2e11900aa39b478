"""The users and groups that a request may name."""

from __future__ import annotations

from stockade.linux.id_maps import IdMaps
from stockade.server.wire.errors import INVALID_REQUEST, ApiError


def require_ids(ids: IdMaps, uid: int | None, gid: int | None) -> None:
    """Refuse a user or a group that the sandbox does not have, and say why it has none besides root."""
    for field, id, known in (("uid", uid, ids.has_uid), ("gid", gid, ids.has_gid)):
        if id is not None and not known(id):
            why = ids.reason or "the sandbox has the users and groups from 0 to 65535"
            raise ApiError(400, INVALID_REQUEST, f"{field}: {id} cannot be used here: {why}")
