"""What all commands share: their options, which are read from their usage, refusals of one sentence, exit codes."""
import argparse
import errno
import functools
import keyword
import os
import re
import sys

MODULES = {"profile": "ncu"}  # of commands; Python has a profile of its own
MOST = 9999  # words of a command that takes any number


class Refused(Exception):
    """A sentence for the user, and the exit code that goes with it."""

    def __init__(self, sentence, code=2):
        super().__init__(sentence)
        self.code = code


def say(*words):
    print(*words, file=sys.stderr, flush=True)


def explain(kind, error, trace):
    """A package of PyPI that is missing is told in a sentence as well."""
    if not isinstance(error, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    package = {"elftools": "pyelftools", "optuna": "optuna==4.*"}.get(error.name, error.name)
    say(f"{os.path.basename(sys.argv[0])}: {sys.executable} lacks {package}; install it with: "
        f"python3 -m pip install '{package}'")
    os._exit(2)


sys.excepthook = explain


def parse_options(usage, most_words=0, argv=None):
    """What was typed, by the lines "  --NAME VALUE  TEXT" of a usage: a VALUE of A|B is one of these, N a whole number,
    and none a flag. TEXT may have (default D), "from N" or "from N to N", and "repeatable". --help prints the usage."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    for name, value, text in re.findall(r"^  (--[a-z0-9-]+)(?: (\S+))? {2,}(.*(?:\n {4,}.*)*)", usage, re.MULTILINE):
        dest = name[2:].replace("-", "_")
        dest += "_" * keyword.iskeyword(dest)
        if not value:
            parser.add_argument(name, dest=dest, action="store_true")
            continue
        default, limits = re.search(r"\(default (\S+)\)", text), re.findall(r"\b(?:from|to) (\d+)", text)
        whole = functools.partial(number, name, **dict(zip(("least", "most"), map(int, limits))))
        parser.add_argument(name, dest=dest, action="append" if "repeatable" in text else "store",
                            default=default and default[1], choices=value.split("|") if "|" in value else None,
                            type=whole if value == "N" else str)
    argv = sys.argv[1:] if argv is None else argv
    try:
        options, rest = parser.parse_known_intermixed_args([word for word in argv if word != "--"])
    except argparse.ArgumentError as error:
        raise Refused(str(error).replace("argument ", "").replace("expected one argument", "its value is missing"))
    for word in rest + options.words[most_words:]:
        raise Refused(f"{word}: no such option")
    if options.help:
        print(usage.strip())
        sys.exit(0)
    return options


def number(option, text, least=1, most=999999):
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise Refused(f"{option} {text}: want a whole number from {least} to {most}")
    return int(text)


def words_of(error):
    """A sentence for what the system refuses."""
    if isinstance(error, BrokenPipeError):
        return "stdout is closed, so not all of it was printed"
    if not getattr(error, "filename", None):
        return str(error)
    hint = "; set SDPA_BUILD_DIR to a folder that can be written to" * (error.errno in (errno.EACCES, errno.EROFS, errno.EPERM))
    return f"{error.filename}: {error.strerror}{hint}"


def command(name, main):
    """Runs a sub-command: what it refuses is one sentence."""
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except (OSError, UnicodeError) as error:
        say(f"{name}: {words_of(error)}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at the end
        sys.exit(3)
    except Refused as error:
        say(f"{name}: {error}")
        sys.exit(error.code)
    except KeyboardInterrupt:
        say(f"{name}: stopped")
        sys.exit(130)
