"""The file with the records of a supervisor, read by another process."""

from __future__ import annotations

import os
import random
from pathlib import Path

from stockade.runs.register import record_file
from stockade.runs.register.record_file import RecordFile

ID = "0123456789ab"


def test_a_reader_beside_a_writer_sees_whole_records_only(tmp_path: Path) -> None:
    file = os.open(tmp_path / "sandboxes", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    own = RecordFile(file)
    words = [bytes([letter]) * length for letter in b"abc" for length in (300, 1500, 5000, 9000)]
    slot = own.add(words[0])
    writer = os.fork()
    if not writer:
        code = 1
        try:
            dice = random.Random(1)
            for _ in range(300):
                slot = own.change(slot, dice.choice(words), ID)
                for _ in range(20):
                    own.free(own.add(dice.choice(words)))
            code = 0
        finally:
            os._exit(code)
    ended = 0, 0
    while not ended[0]:
        ended = os.waitpid(writer, os.WNOHANG)
        found, damaged = record_file.read(file)
        # The sandbox that changes all the time is always there, perhaps in two slots.
        assert not damaged and found and all(one.record in words for one in found)
    assert ended[1] == 0
    os.close(file)
