"""A command of tools/ as ./run_all.sh runs it, in this process, in which its packages are loaded once."""
import contextlib
import importlib
import io
import sys
from unittest import mock

import cli


def run(name, *words):
    """Its exit code, stdout and stderr."""
    module = importlib.import_module(cli.MODULES.get(name, name))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.object(sys, "argv", [name, *words]):
        try:
            cli.command(name, module.main)
        except SystemExit as end:
            return end.code or 0, out.getvalue(), err.getvalue()
