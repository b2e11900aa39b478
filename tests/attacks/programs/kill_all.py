"""Starts a bystander in its own session, kills everything it may, says what the bystander died of."""

import os
import signal

from common import say, tried

bystander = os.fork()
if not bystander:
    os.setsid()
    signal.pause()
answer = tried(os.kill, -1, signal.SIGKILL)
say({"kill": answer, "bystander": os.WTERMSIG(os.waitpid(bystander, 0)[1]), "pid": os.getpid()})
