"""Builds lines of configs.txt, of this tree or another commit, as shared libraries, and reads their resource usage.

A contender is `LINE`, `LINE KNOB=VALUE...`, `COMMIT:LINE [KNOB=VALUE...]`, `cublas [DTYPE=BF16] [HEAD_DIM=128]` or
`torch:cudnn|flash|efficient|math`, or a package: `torch:fa3`, `torch:fa3_tokenspeed`, `torch:fa4`, `flashinfer`.
All arguments are validated before anything is compiled. nvcc compiles a library from bindings/library.cu and sdpa.cu of
its commit, with the same options for all. Libraries are cached in BUILD/engine under a hash of their sources and options.
"""
import ctypes
import functools
import hashlib
import io
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cli import Refused, nearest, no_line, refuse_full_disk, say
from elftools.elf.elffile import ELFFile  # after cli, which reports a missing package

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(ROOT, os.environ.get("SDPA_BUILD_DIR", "build"))
JOBS = int(os.environ.get("JOBS", os.cpu_count() or 2))
CXX = os.environ.get("CXX", "g++")
# Contenders from other packages: the module, the function, and the name of the package for pip.
PACKAGES = {"torch:fa3": ("fa3_fwd_interface", "flash_attn_func", "fa3-fwd"),
            "torch:fa3_tokenspeed": ("flash_attn_interface", "flash_attn_func", "tokenspeed-fa3"),
            "torch:fa4": ("flash_attn.cute.interface", "flash_attn_func", "flash-attn-4"),
            "flashinfer": ("flashinfer", "single_prefill_with_kv_cache", "flashinfer-python")}
TORCH_BACKENDS = dict(cudnn="CUDNN_ATTENTION", flash="FLASH_ATTENTION", efficient="EFFICIENT_ATTENTION", math="MATH")
# All others are scalar. USE_CUBLAS existed in older commits.
FAMILIES = {"wmma": "USE_WMMA", "mma": "USE_MMA_SYNC", "wgmma": "USE_WGMMA", "cublas": "USE_CUBLAS"}
NVCC_OPTIONS = "-O3 -DNDEBUG -std=c++17 --no-compress -Xptxas=-v".split()
KERNELS = ("sdpa.cu", "sdpa_backward.cu")
LIBRARY, HEADER, CUBLAS = "bindings/library.cu", "bindings/sdpa.h", "tools/cublas.cu"
LIBRARY_FUNCTIONS = ("sdpa_library_params_bytes", "sdpa_library_workspace_bytes", "sdpa_library_forward")
EXPRESSIONS = ("SCORE_MOD", "MASK_MOD")  # knobs whose values are C++ expressions
# A line of configs.txt, including what it inherits from its base. words: knobs, arch=ARCH and expect=FAIL.
ConfigLine = namedtuple("ConfigLine", "base words knobs gates")
Knob = namedtuple("Knob", "default member values")  # a row of SDPA_KNOBS


def run(command, **options):
    """Runs a command and returns the finished process with its output as text."""
    return subprocess.run(command, capture_output=True, text=True, **options)


# ---- where sources come from ----

class Tree:
    """The sources of the working tree (no commit) or of a commit."""

    def __init__(self, commit=""):
        self.commit, self.sha = commit, ""
        if commit:
            if not shutil.which("git"):
                raise Refused(f"{commit}: git is missing; install it with: sudo apt-get install git")
            if run(["git", "rev-parse", "--git-dir"], cwd=ROOT).returncode:
                raise Refused(f"{commit}: this folder is not a git repository, so it has no commits")
            found = run(["git", "rev-parse", "--verify", "--quiet", commit + "^{commit}"], cwd=ROOT)
            if found.returncode:
                raise Refused(f"{commit}: no such commit in this repository")
            self.sha = found.stdout.strip()

    def __str__(self):
        return self.commit or "the working tree"

    @functools.lru_cache(None)
    def read(self, path):
        """The text of a file; None if it does not exist."""
        path = os.path.join(self.folder(), path)
        return open(path).read() if os.path.exists(path) else None

    def folder(self):
        """The folder of the sources. A commit is unpacked on first use."""
        if not self.sha:
            return ROOT
        path = os.path.join(BUILD, "commits", self.sha)
        if not os.path.exists(path):
            os.makedirs(path + ".new", exist_ok=True)
            archive = subprocess.Popen(["git", "archive", self.sha], cwd=ROOT, stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", path + ".new"], stdin=archive.stdout, check=True)
            os.rename(path + ".new", path)
        return path

    @property
    def library(self):
        """The path of library.cu: in bindings/, or in tools/ in older commits."""
        older = "tools/library.cu"
        return LIBRARY if self.read(older) is None else older

    @functools.lru_cache(None)
    def sources(self, program):
        """{path: text} of a program and the files that it includes with quotes."""
        found, wanted = {}, [program]
        for path in wanted:
            text = self.read(path)
            if text is not None and path not in found:
                found[path] = text
                wanted += [os.path.normpath(os.path.join(os.path.dirname(path), include))
                           for include in re.findall(r'^#include "(.*)"', text, re.MULTILINE)]
        return found

    @functools.lru_cache(None)
    def read_configs(self):
        """({name: ConfigLine}, error messages about bad lines), read from configs.txt by configs.cmake."""
        name = not self.sha and os.environ.get("SDPA_CONFIGS") or "configs.txt"
        file = os.path.join(self.folder(), name)
        if not os.path.exists(file):
            raise Refused(f"{self} has no {name}, the list of lines to build")
        if not shutil.which("cmake"):
            raise Refused("cmake is missing (it reads configs.txt); install it with: sudo apt-get install cmake")
        lines, trouble = parsed_configs(file, f"{self.folder()}/sdpa.cu", open(file).read(), *map(self.read, KERNELS))
        if not lines and not trouble:
            raise Refused(f"{file}: no configuration in it; a line is NAME KNOB=VALUE ...")
        return lines, trouble

    def config_lines(self):
        """The lines of the forward pass."""
        return {name: line for name, line in self.read_configs()[0].items() if not is_backward(line)}

    def knobs(self):
        """{knob: default} of the rows of SDPA_KNOBS."""
        return {name: knob.default for name, knob in self.knob_rows().items()}

    @functools.lru_cache(None)
    def knob_rows(self, path="sdpa.cu"):
        """{name: Knob} of sdpa.cu, or of sdpa_backward.cu for the knobs that only backward lines have."""
        row = r'^  X\(([A-Z][A-Z_0-9]+), ([A-Z0-9_]*),(?: (\w+),)?[^"\n]*"([^"\n]*)"'
        return {name: Knob(*row) for name, *row in re.findall(row, self.read(path) or "", re.MULTILINE)}

    def refusals(self, is_tuned=True):
        """The parts of sdpa.cu that validate knobs, as a program: section 1, the path to a kernel, and section 7 without the
        cost model. Without USE_TUNED=1 no build reads the tables of tiles: one row of each compiles three times as fast."""
        knobs, path, tables = ((self.read("sdpa.cu").split(since, 1) + [""])[1].split(until)[0] for since, until in (
            ("// ==== 1 KNOBS", "// ==== 2 PROBLEM"), ("// ---- the path to a kernel", "// ----"),
            ("// ==== 7 TABLES", "// ---- the choice")))
        if not is_tuned:
            tables = re.sub(r"(TILES = \{\n.*\n)(?:.*\n)*?(?=\};)", r"\1", tables)
        if tables:
            tables = f"namespace {{\n//{path}\n//{tables}\n}}\n"
        return f"#include <array>\n#include <string_view>\n#include <type_traits>\n//{knobs}\n{tables}"

    def backward_refusals(self):
        """The same for sdpa_backward.cu, which has additional rules."""
        text = self.read("sdpa_backward.cu")
        knobs, rules = (text.split(since, 1)[1].split(until)[0] for since, until in (
            ("// ==== 1 KNOBS", "// ==== 2"), ("// ==== 6 REFUSALS", "// ==== 7")))
        return f"{self.refusals(False)}\n//{knobs}\nnamespace {{\n//{rules}"

    def expression_trouble(self, word):
        """The reason why SCORE_MOD=... or MASK_MOD=... does not compile; "" if it compiles."""
        return run(["cmake", "-DEXPRESSION=" + word, f"-DSOURCE={self.folder()}/sdpa.cu", "-P",
                    os.path.join(os.path.dirname(os.path.abspath(__file__)), "../configs.cmake")]).stdout.strip()

    def refusal(self, words):
        """The message with which sdpa.cu or, with BACKWARD=1, sdpa_backward.cu refuses these knobs; "" if they are legal."""
        program = self.backward_refusals() if "BACKWARD=1" in words else self.refusals("USE_TUNED=1" in words)
        return refusal_of(program, tuple(sorted(definitions(words))))

    @functools.lru_cache(None)
    def program(self, path="sdpa.cu"):
        """A source without the harness and comments."""
        text = self.read(path).split("// ==== COPY TO HERE")[0]
        stripped = run([CXX, "-fpreprocessed", "-dD", "-E", "-P", "-x", "c++", "-"], input=text)
        return text if stripped.returncode else stripped.stdout


@functools.lru_cache(None)
def parsed_configs(file, source, *_):
    """Tree.read_configs() of a file and sdpa.cu. The other arguments are the texts on which the result depends."""
    done = run(["cmake", f"-DCONFIGS={file}", f"-DSOURCE={source}", "-P",
                os.path.join(os.path.dirname(os.path.abspath(__file__)), "../configs.cmake")])
    lines = {}
    for name, base, expect, arch, knobs, gates in (line.split("\t") for line in done.stdout.splitlines()):
        knobs = shlex.split(knobs)
        words = knobs + ["arch=" + arch] * bool(arch) + ["expect=FAIL"] * (expect == "FAIL")
        lines[name] = ConfigLine(base, words, knobs, gates.split())
    return lines, done.stderr.strip()


def is_of_harness(path):
    """True for sources of the executables that a library does not need."""
    return path.startswith("harness/") or path in ("harness.cu", "harness_backward.cu", "reference.cpp")  # the first two: in older commits


def is_backward(line):
    """True if a ConfigLine is built from sdpa_backward.cu."""
    return "BACKWARD=1" in line.knobs


def structs_of(header):
    """{name: ctypes structure} of a C header. Supports members of type int, float, int64_t, size_t, earlier structs and
    pointers."""
    kinds, structs = dict(int=ctypes.c_int, float=ctypes.c_float, int64_t=ctypes.c_int64, size_t=ctypes.c_size_t), {}
    text = " ".join(re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL).split())
    for name, body in re.findall(r"\bstruct (\w+) {(.*?)}", text):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            form = re.fullmatch(r"(?:const )?(\w+) (\*?\w+(?:, \*?\w+)*)", re.sub(r"\* (\w+)$", r" *\1", declaration))
            for member in form[2].split(", ") if form else [""]:
                kind = ctypes.c_void_p if member[:1] == "*" else form and (kinds | structs).get(form[1])
                if not kind:
                    raise Refused(f"{HEADER}: {name} has {declaration}; want int, float, int64_t, size_t, an earlier struct "
                                  "or pointers")
                fields.append((member.strip("*"), kind))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


@functools.lru_cache(None)
def refusal_of(program, options):
    compiled = run([CXX, "-std=c++17", "-fsyntax-only", *options, "-x", "c++", "-"], input=program)
    return assertion_words(compiled.stderr)


def definitions(words):
    """The knobs of a line as compiler options."""
    return ["-D" + word for word in words if not word.startswith(("expect=", "arch="))]


def changed(words, changes):
    """A line's words with some knobs replaced."""
    names = [change.split("=")[0] for change in changes]
    return [word for word in words if word.split("=")[0] not in names] + list(changes)


def assertion_words(text):
    """The first static assertion in the output of nvcc, clang++ or g++."""
    because = "(?: due to requirement '.*?')?"  # followed by a colon since clang++ 16
    found = re.search(rf'static(?: assertion|_assert) failed{because}(?:: (.*)| .*?"(.*)")$', text, re.MULTILINE)
    return found[1] or found[2] if found else ""


# ---- contenders ----

@dataclass(frozen=True)
class Line:
    """A line of configs.txt with some of its knobs changed."""
    tree: Tree
    name: str
    changes: tuple = ()

    @property
    def text(self):
        return " ".join([f"{self.tree.commit}:{self.name}" if self.tree.commit else self.name, *map(shlex.quote, self.changes)])

    @property
    def label(self):
        """The name in CSV rows."""
        return self.text.replace(" ", "__").replace("=", "_")

    @property
    def target(self):
        """A name for an executable."""
        return re.sub(r"\W+", "_", self.label.rpartition(":")[2])

    @property
    def gates(self):
        return self.tree.read_configs()[0][self.name].gates

    @property
    def words(self):
        return changed(self.tree.read_configs()[0][self.name].words, self.changes)

    def knob(self, name, otherwise=""):
        return dict(word.split("=", 1) for word in self.words).get(name, otherwise)

    def runs_on(self, arch):
        """True if the line runs on a GPU: arch=89 includes newer GPUs, arch=90a does not."""
        own = self.knob("arch")
        return own in ("", arch) or own.isdigit() and int(arch.strip("a")) > int(own)

    def archs(self, wanted):
        """The architectures to compile for: those of `wanted` on which it runs, or its own arch if there are none."""
        return [arch for arch in wanted if self.runs_on(arch)] or [self.knob("arch")]

    @property
    def is_backward(self):
        """True if the line computes gradients."""
        return self.knob("BACKWARD") == "1"

    @property
    def repeats(self):
        """False if the last bits of dQ differ from run to run."""
        adds_dq = self.is_backward and "1" in (self.knob("ONE_PASS"), self.knob("USE_WARP_SPECIALIZATION"))
        return not adds_dq or self.knob("ORDERED_ADDS") == "1"

    def knob_rows(self):
        """{name: Knob} of the knobs that the line can have."""
        own = self.tree.knob_rows("sdpa_backward.cu") if self.is_backward else {}
        return self.tree.knob_rows() | own

    def effective_knobs(self):
        """All knobs with their values, including defaults."""
        rows = self.knob_rows()
        defaults = [f"{name}={knob.default}" for name, knob in rows.items()]
        return sorted(word for word in changed(defaults, self.words) if word.split("=")[0] in rows)

    @property
    def D(self):
        return int(self.knob("HEAD_DIM", 64))

    @property
    def Dv(self):
        """The head size of V and O; 0: D."""
        return int(self.knob("HEAD_DIM_V", 0))

    @property
    def takes_fewer(self):
        """True if the line accepts smaller D and Dv, in multiples of 8."""
        return self.family == "wgmma"

    @property
    def dtype(self):
        """The type in CSV rows: one type, or Q's type and the type of K and V."""
        types = [self.knob("DTYPE", "FP16"), self.knob("KV_DTYPE", "AUTO")]
        return "/".join(types[:1 if types[1] == "AUTO" else 2]).lower().replace("fp8_", "")

    @property
    def out_dtype(self):
        own = self.knob("OUT_DTYPE", "AUTO").lower()
        of_q = self.dtype.partition("/")[0]
        return own if own != "auto" else of_q if of_q in ("fp16", "bf16") else "fp16"

    @property
    def family(self):
        return next((family for family, knob in FAMILIES.items() if self.knob(knob) == "1"), "scalar")


class Cublas(Line):
    """The unfused baseline, tools/cublas.cu."""
    family = "cublas"

    @property
    def words(self):
        return list(self.changes)


class Torch(namedtuple("Torch", "text")):
    """A backend of PyTorch's scaled_dot_product_attention, or a package for PyTorch tensors."""
    D = dtype = None  # any
    family, words, takes_fewer = "torch", (), True

    @property
    def backend(self):
        return self.text.partition(":")[2]

    @property
    def label(self):
        return self.text.replace(":", "_")


def parse_contenders(words):
    """Parses contenders: a name starts a contender, KNOB=VALUE changes it."""
    found, trees = [], {}
    for word in words:
        if re.match(r"[A-Za-z_]\w*=", word):
            if not found or isinstance(found[-1], Torch):
                raise Refused(f"{word}: a knob must follow the line that it changes")
            found[-1] = change_line(found[-1], word)
        elif word.startswith("torch:") or word in PACKAGES:
            known = ["torch:" + backend for backend in TORCH_BACKENDS] + list(PACKAGES)
            if word not in known:
                raise Refused(f"{word}: want {', '.join(known)}")
            found.append(Torch(word))
        else:
            commit, _, name = word.rpartition(":")
            if commit not in trees:
                trees[commit] = loadable(Tree(commit))
            if word != "cublas":
                config_line(trees[commit], name, word)
            found.append((Cublas if word == "cublas" else Line)(trees[commit], name))
    for line in found:
        sentence = line.tree.refusal(line.words) if isinstance(line, Line) and line.changes else ""
        if sentence:
            raise Refused(f"{line.text}: {sentence}")
    return found


def config_line(tree, name, typed):
    """The ConfigLine of a name. Refuses an unknown name."""
    lines, trouble = tree.read_configs()
    if name not in lines:
        raise no_line(typed, name, lines, trouble)
    return lines[name]


def no_knob(knob, names, place=""):
    return f"no knob is called {knob}{place}; {nearest(knob, names) or 'the knobs are ' + ' '.join(names)}"


def names_matching(pattern, names, option="--only", trouble=""):
    """The names that match an option's regular expression. Refuses if there are none. trouble: the errors of lines that cannot
    be read."""
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error:
        raise Refused(f"{option} {pattern}: not a regular expression") from None
    if not found:
        raise Refused("; ".join([f"{option} {pattern}: no line of configs.txt has such a name", *trouble.splitlines()]))
    return found


def lines_named(pattern, option="--only"):
    """The lines whose names match an option's regular expression."""
    tree = Tree()
    lines, trouble = tree.read_configs()
    return [Line(tree, name) for name in names_matching(pattern, lines, option, trouble)]


def has_bad_lines():
    """Prints errors in configs.txt. Returns True if there are any."""
    sentences = Tree().read_configs()[1]
    if sentences:
        say(sentences)
    return bool(sentences)


def change_line(line, word):
    """The line with another knob changed."""
    knob = word.split("=")[0]
    if knob in ("expect", "arch") or not (knob in EXPRESSIONS or re.fullmatch(r"[A-Za-z_]\w*=[A-Za-z0-9_]+", word)):
        raise Refused(f"{word} is no knob")
    if knob == "BACKWARD":
        raise Refused(f"{word}: a line has either the forward or the backward pass; choose another line")
    if knob in line.tree.knob_rows("sdpa_backward.cu") and not line.is_backward:
        raise Refused(f"{word}: a knob of sdpa_backward.cu, and {line.name} is a line of the forward pass")
    if knob not in line.knob_rows():
        raise Refused(f"{word}: {no_knob(knob, line.knob_rows(), f' in {line.tree}')}")
    trouble = line.tree.expression_trouble(word) if knob in EXPRESSIONS else ""
    if trouble:
        raise Refused(trouble)
    if isinstance(line, Cublas) and knob not in ("DTYPE", "HEAD_DIM"):
        raise Refused(f"{word}: cublas has only the knobs DTYPE and HEAD_DIM")
    return type(line)(line.tree, line.name, tuple(changed(line.changes, [word])))


def loadable(tree):
    """Returns the tree. Refuses a tree whose lines cannot be loaded as libraries."""
    missing = [name for name in LIBRARY_FUNCTIONS if name + "(" not in (tree.read(tree.library) or "")]
    if missing:
        raise Refused(f"{tree}: its {tree.library} has no {missing[0]}, so its lines cannot be loaded")
    return tree


# ---- building ----

def nvcc(tool="nvcc"):
    """The path of nvcc or another tool of the CUDA Toolkit; None if it is missing."""
    return shutil.which(tool) or shutil.which(os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", tool))


# A line that was built as a library: its path, or the reason why it does not compile.
Built = namedtuple("Built", "line path trouble log", defaults=("", "", ""))


def build(lines, *archs, program=LIBRARY, kind="-shared", progress=lambda *_: None):
    """Builds lines as libraries, as device code (kind="-fatbin"), or as another program that includes sdpa.cu (kind="").
    Returns {line: Built}. Compiles for these architectures unless a line has its own."""
    if not nvcc():
        raise Refused("nvcc is missing; install the CUDA Toolkit 12.4 or newer, or put its bin folder on PATH")
    lines, built = list(dict.fromkeys(lines)), {}
    with ThreadPoolExecutor(JOBS) as pool:
        for one in pool.map(functools.partial(build_one, archs=archs, program=program, kind=kind), lines):
            built[one.line] = one
            progress(len(built), len(lines), one.line.text)
    return built


def show_progress():
    """A progress callback for build() and cmake_build(): prints "built 7 of 81, 30 s left: NAME" to stderr."""
    since, is_terminal = time.monotonic(), sys.stderr.isatty()

    def show(done, count, name):
        left = (time.monotonic() - since) * (count - done) / done
        text = f"built {done} of {count}{f', {left:.0f} s left' if left >= 5 else ''}: {name}"
        end = "" if is_terminal and done < count else "\n"
        print("\r\033[K" * is_terminal + text, end=end, file=sys.stderr, flush=True)
    return show


def build_one(line, archs, program, kind):
    is_line = program == LIBRARY and not isinstance(line, Cublas)
    program = line.tree.library if is_line else CUBLAS if program == LIBRARY else program
    sources = line.tree.sources(program)
    of_kind = {"-shared": ["-shared", "-Xcompiler=-fPIC,-fno-gnu-unique"],
               "-fatbin": ["-fatbin", "-DSDPA_DEVICE_CODE_ALONE"], "": []}
    options = [*NVCC_OPTIONS, *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in line.archs(archs)),
               "-DSDPA_CONFIG_NAME=" + line.target,
               # nvcc splits definitions at commas.
               *sorted(word.replace(",", r"\,") for word in definitions(line.words)), *of_kind[kind]]
    if line.family == "cublas" and kind != "-fatbin":
        folder = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(nvcc()))), "lib64")
        options += ["-lcublas", "-Xlinker=-rpath=" + folder]
    version = run([nvcc(), "--version"]).stdout
    # Changes of comments or of the harness, which a library does not contain, do not rebuild libraries.
    texts = [line.tree.program(path) if path in ("sdpa.cu", "sdpa_backward.cu") else text for path, text in sources.items()
             if not is_of_harness(path)] if is_line else sources.values()
    folder = os.path.join(BUILD, "engine", digest(*sources, *texts))
    for path, text in sources.items():
        path = os.path.join(folder, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.exists(path):
            replace_file(path, text)
    path = os.path.join(folder, f"{line.target[:60]}-{digest(version, program, *options)}.so")
    trouble = compile_once(path, [nvcc(), *options, program], folder)
    return Built(line, trouble=trouble) if trouble else Built(line, path, log=open(path + ".log").read())


@functools.cache
def auto_var_init():
    """The option that fills uninitialized variables with a pattern, if the compiler has it (g++ 12, clang++)."""
    option = "-ftrivial-auto-var-init=pattern"
    return [option] if not run([CXX, option, "-fsyntax-only", "-x", "c++", "-"], input="").returncode else []


HOST = [CXX, "-std=c++17", "-ffp-contract=off", "-w", "-pthread", "-fPIC", "-Icpu_backend"]


def host_sources():
    """The texts of the CPU backend."""
    folder = os.path.join(ROOT, "cpu_backend")
    return [Tree().read("cpu_backend/" + name) for name in sorted(os.listdir(folder))]


def host_engine():
    """Compiles the CPU backend, which depends on no knob and takes longer than most kernels. Returns the path of the object."""
    path = os.path.join(BUILD, "engine", f"host-engine-{digest(*host_sources())}.o")
    trouble = compile_once(path, [*HOST, *auto_var_init(), "-O2", "-c", "cpu_backend/engine.cpp"], ROOT)
    if trouble:
        raise Refused(f"cpu_backend/engine.cpp does not compile: {trouble}", 3)
    return path


def host_library(*knobs, program=LIBRARY):
    """Compiles bindings/library.cu, or a program that includes it, for the CPU backend. Returns its path."""
    sources = [*Tree().sources(program).values(), *host_sources()]
    path = os.path.join(BUILD, "engine", f"host-{digest(program, *knobs, *sources)}.so")
    command = [*HOST, *auto_var_init(), "-Og", "-shared", *definitions(knobs), host_engine(), "-x", "c++", program]
    trouble = compile_once(path, command, ROOT)
    if trouble:
        raise Refused(f"{program} does not compile: {trouble}", 3)
    return path


def compile_once(path, command, folder):
    """Compiles `path` if it does not exist, with the output in path.log. Returns the error message, or ""."""
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        new = own_name(path)
        compiled = run([*command, "-o", new], cwd=folder)
        replace_file(path + ".log", compiled.stdout + compiled.stderr)
        if compiled.returncode:
            return compiler_words(compiled.stdout + compiled.stderr)
        os.rename(new, path)
    return ""


def cmake_build(folder, source=ROOT, target="sdpa_selected", keep_going=False, progress=lambda *_: None, **options):
    """Builds the lines that the options select with CMake. Returns the finished process."""
    options = dict(SDPA_TESTS="OFF", SDPA_KEEP_GOING=keep_going, SDPA_ARCHS=os.environ.get("SDPA_ARCHS", ""),
                   SDPA_CONFIGS=os.path.join(ROOT, os.environ.get("SDPA_CONFIGS") or "configs.txt")) | options
    generator = {"CMAKE_GENERATOR": "Ninja"} if shutil.which("ninja") else {}  # affects only a new folder
    os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise Refused(f"{folder}: not a writable folder; set SDPA_BUILD_DIR to one")
    done = run(["cmake", "-S", source, "-B", folder, *(f"-D{name}={value}" for name, value in options.items())],
               env=generator | os.environ)
    if done.returncode:
        refuse_full_disk(done.stdout + done.stderr, folder)
        raise Refused(f"CMake could not configure {folder}: {' '.join(done.stderr.split())[:300]}")
    with open(os.path.join(folder, "configs.tsv")) as file:
        count = sum(line.split("\t")[2] == "yes" for line in file)
    endless = "-k0" if os.path.exists(os.path.join(folder, "build.ninja")) else "-k"
    command = ["cmake", "--build", folder, "-j", str(JOBS), "--target", target, *["--", endless] * bool(keep_going)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text, linked = "", 0
    for line in process.stdout:
        text += line
        if re.search("Linking .* executable", line):
            linked += 1
            progress(linked, count, line.split("executable ")[1].partition("_")[2].strip())
    if process.wait():
        refuse_full_disk(text, folder)
    return subprocess.CompletedProcess(command, process.returncode, text, "")


def replace_file(path, text):
    """Writes a file atomically."""
    new = own_name(path)
    try:
        with open(new, "w") as out:
            out.write(text)
    except OSError as error:
        error.filename = path  # write() does not set it
        raise
    os.rename(new, path)


def own_name(path):
    """A temporary name next to `path`, unique to this thread."""
    return f"{path}.{os.getpid()}-{threading.get_ident()}"


def digest(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def compiler_words(log):
    """The reason why a line did not compile. Raises if the disk is full."""
    refuse_full_disk(log, BUILD)
    errors = [line for line in log.splitlines() if re.search("error|fatal", line)]
    return assertion_words(log) or (errors or log.strip().splitlines()[-1:] or ["the compiler printed nothing"])[0]


# ---- resource usage and identity of libraries ----

MIX = {"tensor": r"HMMA|HGMMA|QGMMA|IMMA", "MUFU": "MUFU", "FFMA": "FFMA", "LDS": r"LDSM?[. ]", "BAR": "BAR|SYNCS",
       "instructions": ""}


@dataclass
class Facts:
    """Facts about a library, from its code and from ptxas's report."""
    registers: int = 0  # maximum over its kernels
    spilled: int = 0    # bytes
    archs: tuple = ()
    wgmma: tuple = ()  # ptxas's warnings about wgmma: C7510 serialized, C7519 inserted an arrive
    threads: int = 0
    shared_bytes: int = 0
    block_m: int = 0
    code_bytes: int = 0
    code: str = ""  # hash of the machine code
    same: str = ""  # hash of the machine code and the host program
    path: str = ""

    @property
    def mix(self):
        """Instruction counts by kind; empty without cuobjdump. Takes a second."""
        words = run(["cuobjdump", "-sass", self.path]).stdout if self.path and shutil.which("cuobjdump") else ""
        code = re.findall(r"^ +/\*[0-9a-f]{4,}\*/ +(?:@!?U?P[0-9T]+ +)?(?!NOP)([A-Z][^;]*);", words, re.MULTILINE)
        return {kind: sum(bool(re.match(pattern, text)) for text in code) for kind, pattern in MIX.items() if code}


def facts(built):
    with open(built.path, "rb") as file:
        data = file.read()
    code = [section.hex() for section in machine_code(data)]
    return Facts(*ptxas_report(built.log), *launch_of(data), sum(map(len, code)) // 2, digest(*code),
                 digest(*code, *map(built.line.tree.program, ["sdpa.cu", *["sdpa_backward.cu"] * built.line.is_backward]),
                        *built.line.effective_knobs()), built.path)


def ptxas_report(log):
    """Maximum registers and spilled bytes over the kernels, their architectures, and codes of warnings about wgmma."""
    registers = map(int, re.findall(r"Used (\d+) registers", log))
    spilled = [int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)]
    words = (re.findall(pattern, log) for pattern in (r"Compiling entry .* for 'sm_(\w+)'", r"\((C75\d\d)\)"))
    return max(registers, default=0), max(spilled, default=0), *(tuple(sorted(set(found))) for found in words)


def machine_code(data):
    """The machine code in an object file or library, without names, line numbers and checksums."""
    return [section.data() for cubin in embedded(data) for section in cubin.iter_sections()
            if section.name.startswith(".text.")]


def embedded(data):
    """The embedded ELF files with device code, one per architecture."""
    starts = [one.start() for one in re.finditer(b"\x7fELF", data)]
    return [elf for elf in (ELFFile(io.BytesIO(data[at:])) for at in starts if at) if elf["e_machine"] == "EM_CUDA"]


def symbol(elf, table, name):
    """A symbol's entry; None if it does not exist."""
    found = elf.get_section_by_name(table).get_symbol_by_name(name)
    return found[0].entry if found else None


def launch_of(data):
    """Threads, bytes of shared memory and BLOCK_M. Device code has them in a constant, a library as sizes of symbols."""
    for cubin in embedded(data):
        if found := symbol(cubin, ".symtab", "sdpa_library_launch"):
            return struct.unpack_from("<3i", cubin.get_section_by_name(".nv.constant3").data(), found.st_value)
    found = [symbol(ELFFile(io.BytesIO(data)), ".dynsym", "sdpa_library_" + name)
             for name in ("threads", "smem_bytes", "block_m")]
    return [one.st_size if one else 0 for one in found]
