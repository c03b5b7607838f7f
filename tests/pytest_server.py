"""Runs pytest in forks of a process that has imported packages, which takes seconds for PyTorch. Used by tests/bugs.py.

usage: pytest_server.py PACKAGE...
Reads requests from standard input, one JSON list per line: the folder of the tests, environment variables, pytest's words, the file
for the output, and a limit in seconds. Prints the exit code of each; -14 (SIGALRM) past the limit.
"""
import contextlib
import importlib
import json
import os
import signal
import sys

import pytest


def run_tests(folder, environment, words, output, limit):
    """Runs pytest in this process, which ends."""
    signal.alarm(limit)
    os.chdir(folder)
    os.environ.update(environment)
    sys.path[0] = folder
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    code = pytest.main(words)
    sys.stdout.flush()
    os._exit(code)


def main():
    for package in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setsid()
            run_tests(*json.loads(line))
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):  # ends the processes that the tests started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
