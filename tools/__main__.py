"""usage: python3 tools COMMAND WORD...           run a command of ./run_all.sh; its --help lists them
       python3 tools --judge COMMAND WORD...   only refuse bad arguments, as far as possible without packages"""
import ast
import ctypes
import importlib
import importlib.util
import os
import re
import sys

import cli

FOLDER = os.path.dirname(os.path.abspath(__file__))
TAKE_LINES = "ab ablate extract profile stress".split()
NO_LINES = ("cublas", "flashinfer")  # contenders that are not lines
# Commands that need a GPU, and their options that do not.
NEED_GPU = dict(dict.fromkeys("ablate micro profile rungs sanitize stress".split(), ()), fit=("from", "check"),
                tune=("dry-run", "replay", "export"))


def has_gpu():
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def judge(command, words):
    """Refuses bad options, unknown lines and a missing GPU before the packages of the command are installed."""
    with open(os.path.join(FOLDER, cli.MODULES.get(command, command) + ".py")) as file:
        usage = cli.usage_of(command, ast.get_docstring(ast.parse(file.read())))
    options = cli.parse_options(usage, cli.MOST, words[:words.index("--")] if "--" in words else words)
    if command in TAKE_LINES:
        with open(os.environ.get("SDPA_CONFIGS") or os.path.join(FOLDER, "../configs.txt"), encoding="utf-8-sig") as file:
            lines = re.findall(r"^[ \t]*([A-Za-z]\w*)", file.read(), re.MULTILINE)
        for word in options.words:
            if re.fullmatch(r"[A-Za-z]\w*", word) and not word.isupper() and word not in (*lines, *NO_LINES):
                raise cli.no_line(word, word, lines)
    without = NEED_GPU.get(command, ())
    given = [name for name in without if getattr(options, name.replace("-", "_") + "_" * (name == "from"))]
    if (command in NEED_GPU and not given or command == "gates" and options.time) and not has_gpu():
        hint = f"; --{', --'.join(without[:-1])} and --{without[-1]} need none" if without else ""
        raise cli.Refused(f"it runs kernels and there is no GPU here{hint}")


del sys.argv[0]
is_judged = sys.argv[:1] == ["--judge"]
del sys.argv[:is_judged]
command = sys.argv[0] if sys.argv else "--help"
module = cli.MODULES.get(command, command)
if command in ("-h", "--help"):
    print(__doc__)
elif not module.isidentifier() or not importlib.util.find_spec(module):
    names = [name.partition(".")[0] for name in os.listdir(FOLDER)]
    cli.say(f"{command}: no such command; {cli.nearest(command, names) or './run_all.sh --help lists them'}")
    sys.exit(2)
elif is_judged:
    cli.command(command, lambda: judge(command, sys.argv[1:]))
else:
    cli.command(command, lambda: importlib.import_module(module).main())
