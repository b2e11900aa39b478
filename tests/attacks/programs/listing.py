"""Lists a directory: PATH."""

import errno
import os
import sys

from common import say

try:
    say(sorted(os.listdir(sys.argv[1])))
except OSError as failure:
    say(errno.errorcode[failure.errno])
