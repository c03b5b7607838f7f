"""python3 tools COMMAND WORD...: what ./run_all.sh runs for most of its commands."""
import importlib
import sys

import cli

del sys.argv[0]
cli.command(sys.argv[0], lambda: importlib.import_module(cli.MODULES.get(sys.argv[0], sys.argv[0])).main())
