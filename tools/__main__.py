"""usage: python3 tools COMMAND WORD...: what ./run_all.sh runs for most of its commands, which its --help lists."""
import importlib
import importlib.util
import sys

import cli

del sys.argv[0]
command = sys.argv[0] if sys.argv else "--help"
module = cli.MODULES.get(command, command)
if command in ("-h", "--help"):
    print(__doc__)
elif not module.isidentifier() or not importlib.util.find_spec(module):
    cli.say(f"{command}: no such command; ./run_all.sh --help lists them")
    sys.exit(2)
else:
    cli.command(command, lambda: importlib.import_module(module).main())
