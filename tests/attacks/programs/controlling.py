"""Says whether it has a controlling terminal."""

import os

from common import opened, say

say(opened("/dev/tty", os.O_RDWR))
