"""Connects to each of a list of [HOST, PORT, TEXT], sends the text and says what came back first.

All at once, each in a thread of its own. The verdict has the hosts and ports as keys: the beginning of
the answer, "" for an end without one, or the name of the error.
"""

import errno
import json
import socket
import sys
import threading

from common import say

SECONDS = 4


def dial(host, port, text):
    try:
        with socket.create_connection((host, port), SECONDS) as end:
            end.sendall(text.encode("latin-1"))
            return end.recv(400).decode("latin-1")
    except socket.gaierror:
        return "no such name"
    except TimeoutError:
        return "ETIMEDOUT"
    except UnicodeError:
        return "no name"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


def main():
    verdict = {}

    def one(host, port, text):
        verdict[f"{host} {port}"] = dial(host, port, text)

    threads = [threading.Thread(target=one, args=each) for each in json.loads(sys.argv[1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(verdict)


main()
