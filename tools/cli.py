"""Shared by all commands: option parsing from the usage text, error messages, and exit codes."""
import argparse
import difflib
import errno
import functools
import keyword
import os
import re
import shutil
import sys
import tempfile

# Modules of commands that have another name; `profile` is a module of Python.
MODULES = {"ablate": "steps", "profile": "ncu", "results": "page", "rungs": "steps"}
MOST = 9999  # for commands with any number of words


class Refused(Exception):
    """An error message for the user, with an exit code."""

    def __init__(self, sentence, code=2):
        super().__init__(sentence)
        self.code = code


def say(*words):
    print(*words, file=sys.stderr, flush=True)


def nearest(name, names):
    """"did you mean NAME?" for the most similar name; "" if none is similar."""
    by_letters = {one.lower(): one for one in names}
    return "".join(f"did you mean {by_letters[near]}?" for near in difflib.get_close_matches(name.lower(), by_letters, 1, 0.7))


def no_line(typed, name, lines, trouble=""):
    """The error for a name that no line of configs.txt has. trouble: the errors of lines that cannot be read."""
    if trouble:
        return Refused(f"{typed}: no line of configs.txt that can be read has that name; {'; '.join(trouble.splitlines())}")
    return Refused(f"{typed}: no line of configs.txt has that name; {nearest(name, lines) or './run_all.sh list has them all'}")


def refuse_full_disk(words, *folders):
    """Raises if a program failed because a disk is full: its output says so, or less than 4 MB are free in a folder."""
    said = re.search(r".*(?:No space left on device|Disk quota exceeded).*((?<=:)\s+\S+)?", words)  # CMake prints the file two lines below
    left = {folder: shutil.disk_usage(folder).free for folder in (*folders, tempfile.gettempdir()) if os.path.exists(folder)}
    full = [" ".join(said[0].split())] if said else [f"{folder} has {free >> 10} KB left" for folder, free in left.items() if free < 4 << 20]
    if full:
        raise Refused(f"{os.strerror(errno.ENOSPC)}: {full[0]}; free some, or set SDPA_BUILD_DIR or TMPDIR to a folder with more", 3)


def explain(kind, error, trace):
    """An exception hook that reports a missing package in one sentence."""
    if not isinstance(error, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    package = {"elftools": "pyelftools", "ml_dtypes": "ml_dtypes==0.5.*", "optuna": "optuna==4.*"}.get(error.name, error.name)
    say(f"{os.path.basename(sys.argv[0])}: {sys.executable} lacks {package}; install it with: "
        f"python3 -m pip install '{package}'")
    os._exit(2)


sys.excepthook = explain


def usage_of(command, text):
    """The paragraphs of a docstring without the usages of other commands, which begin with "usage:"."""
    return "\n\n".join(part for part in text.split("\n\n") if not part.startswith("usage:") or f"./run_all.sh {command} " in part)


def parse_options(usage, most_words=0, argv=None):
    """Parses the arguments by the lines "  --NAME VALUE  TEXT" of a usage. VALUE: A|B is a choice, N a whole number, and
    without VALUE it is a flag. TEXT may contain (default D), "from N" or "from N to N", and "repeatable". --help prints the
    usage."""
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
        hint = nearest(word.partition("=")[0], [name for action in parser._actions for name in action.option_strings])
        raise Refused(f"{word}: no such option{hint and f'; {hint}'}")
    if options.help:
        print(usage.strip())
        sys.exit(0)
    return options


def number(option, text, least=1, most=999999):
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise Refused(f"{option} {text}: want a whole number from {least} to {most}")
    return int(text)


def words_of(error):
    """The error message of an OSError."""
    if isinstance(error, BrokenPipeError):
        return "stdout is closed, so not all of it was printed"
    if not getattr(error, "filename", None):
        return str(error)
    build = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.environ.get("SDPA_BUILD_DIR", "build"))
    is_refused = error.errno in (errno.EACCES, errno.EROFS, errno.EPERM) and os.path.abspath(error.filename).startswith(build)
    return f"{error.filename}: {error.strerror}{'; set SDPA_BUILD_DIR to a writable folder' * is_refused}"


def command(name, main):
    """Runs a command. Prints errors as one sentence and exits."""
    if sys.stdout is None:
        say(f"{name}: stdout is closed")
        sys.exit(3)
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except (OSError, UnicodeError) as error:
        say(f"{name}: {words_of(error)}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        sys.exit(3)
    except Refused as error:
        say(f"{name}: {error}")
        sys.exit(error.code)
    except KeyboardInterrupt:
        say(f"{name}: stopped")
        sys.exit(130)
