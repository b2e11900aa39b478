"""Questions about connections that no rule covers: the supervisor puts them to the user.

The connection waits meanwhile. Programs decide how many questions there are, so everything is bounded: how
many wait, how many there are in the life of the process, how many connections are held for them, and how
long. Connections to the same place share a question, and a refusal is remembered.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time

#: How long a connection waits for an answer.
HOLD_SECONDS = 60.0
#: How many questions wait at once, how many there are at most, and how many connections wait for answers.
MOST_WAITING, MOST_QUESTIONS, MOST_HELD = 8, 100, 64
#: The answers: this connection alone, by a rule that is in force now, not at all.
ONCE, BY_RULE, NO = "once", "rule", "no"
#: Why a connection is refused.
REFUSED, NO_ANSWER, TOO_MANY = "refused when asked", "no answer", "too many questions"
_ANSWER_SIZE = 4096


class Questions:
    """Asks over a SOCK_SEQPACKET socket to the supervisor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
        self._loop, self._channel = loop, channel
        self._count = 0
        #: How many connections wait for an answer.
        self.held = 0
        #: What was asked and not answered yet, and the place that each number stands for.
        self._asked: dict[tuple[str, int], asyncio.Future[str]] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._refused: dict[tuple[str, int], str] = {}
        channel.setblocking(False)
        loop.add_reader(channel, self._read)

    async def ask(self, name: str, port: int, connection: socket.socket) -> str:
        """Return ONCE or BY_RULE for a connection that may go on, otherwise the reason of its refusal."""
        place = name, port
        if place in self._refused:
            return self._refused[place]
        if self.held >= MOST_HELD:
            return TOO_MANY
        future = self._asked.get(place) or self._send(place, connection)
        if future is None:
            return TOO_MANY
        self.held += 1
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                answer = await asyncio.shield(future)
        except TimeoutError:
            answer = NO_ANSWER
            self._settle(place, answer)
        finally:
            self.held -= 1
        return answer

    def _send(self, place: tuple[str, int], connection: socket.socket) -> asyncio.Future[str] | None:
        if len(self._asked) >= MOST_WAITING or self._count >= MOST_QUESTIONS:
            return None
        self._count += 1
        question = {
            "id": self._count, "name": place[0], "port": place[1], "at": time.monotonic(),
            "inside": _ends_of(connection),
        }  # fmt: skip
        try:
            self._channel.send(json.dumps(question).encode())
        except OSError:
            return None
        self._places[self._count] = place
        future = self._asked[place] = self._loop.create_future()
        return future

    def _settle(self, place: tuple[str, int], answer: str) -> None:
        future = self._asked.pop(place, None)
        if answer not in (ONCE, BY_RULE):
            self._refused[place] = answer
        if future is not None and not future.done():
            future.set_result(answer)

    def _read(self) -> None:
        try:
            text = self._channel.recv(_ANSWER_SIZE)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if not text:
            self._loop.remove_reader(self._channel)
            for place in list(self._asked):
                self._settle(place, NO_ANSWER)
            self._count = MOST_QUESTIONS
            return
        answer = json.loads(text)
        number, said = answer["id"], answer["answer"]
        if number in self._places:
            self._settle(self._places.pop(number), said if said in (ONCE, BY_RULE) else REFUSED)


def _ends_of(connection: socket.socket) -> list[object] | None:
    """Return the ends of a connection as its program has them; None if the program has gone."""
    try:
        own, other = connection.getpeername(), connection.getsockname()
    except OSError:
        return None
    return [own[0].partition("%")[0], own[1], other[0].partition("%")[0], other[1]]
