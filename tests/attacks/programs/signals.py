"""Sends signals to a process: PID. 0 only asks whether it could."""

import os
import sys

from common import say, tried

say({str(number): tried(os.kill, int(sys.argv[1]), number) for number in map(int, sys.argv[2:])})
