"""The lines of configs.txt, here or in another commit, as shared libraries; and what each takes of an SM.

A contender is `LINE`, `LINE KNOB=VALUE...`, `COMMIT:LINE [KNOB=VALUE...]`, `cublas [DTYPE=BF16] [HEAD_DIM=128]` or
`torch:cudnn|flash|efficient|math`, or a package: `torch:fa3`, `torch:fa3_tokenspeed`, `torch:fa4`, `flashinfer`.
Everything that was typed is judged before anything is compiled. A library is compiled by nvcc from
bindings/library.cu and sdpa.cu of its commit, with the same options for all, and kept under BUILD/engine by what
it was compiled from.
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
from elftools.elf.elffile import ELFFile  # behind cli, which says what to do where it is missing

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(ROOT, os.environ.get("SDPA_BUILD_DIR", "build"))
JOBS = int(os.environ.get("JOBS", os.cpu_count() or 2))
CXX = os.environ.get("CXX", "g++")
# Of packages of their own: the module, the function, and what pip calls it.
PACKAGES = {"torch:fa3": ("fa3_fwd_interface", "flash_attn_func", "fa3-fwd"),
            "torch:fa3_tokenspeed": ("flash_attn_interface", "flash_attn_func", "tokenspeed-fa3"),
            "torch:fa4": ("flash_attn.cute.interface", "flash_attn_func", "flash-attn-4"),
            "flashinfer": ("flashinfer", "single_prefill_with_kv_cache", "flashinfer-python")}
TORCH_BACKENDS = dict(cudnn="CUDNN_ATTENTION", flash="FLASH_ATTENTION", efficient="EFFICIENT_ATTENTION", math="MATH")
# Else scalar; USE_CUBLAS is of older commits.
FAMILIES = {"wmma": "USE_WMMA", "mma": "USE_MMA_SYNC", "wgmma": "USE_WGMMA", "cublas": "USE_CUBLAS"}
NVCC_OPTIONS = "-O3 -DNDEBUG -std=c++17 --no-compress -Xptxas=-v".split()
LIBRARY, HEADER, CUBLAS = "bindings/library.cu", "bindings/sdpa.h", "tools/cublas.cu"
LIBRARY_FUNCTIONS = ("sdpa_library_params_bytes", "sdpa_library_workspace_bytes", "sdpa_library_forward")
EXPRESSIONS = ("SCORE_MOD", "MASK_MOD")  # knobs whose values are C++ expressions
# A line of configs.txt with what it has from its base; words: its knobs, arch=ARCH and expect=FAIL where it has them.
ConfigLine = namedtuple("ConfigLine", "base words knobs gates")
Knob = namedtuple("Knob", "default member values")  # a row of SDPA_KNOBS; values: as it writes them


def run(command, **options):
    """The finished process; its output is text."""
    return subprocess.run(command, capture_output=True, text=True, **options)


# ---- where sources come from ----

class Tree:
    """The sources as they stand here (no commit), or those of a commit."""

    def __init__(self, commit=""):
        self.commit, self.sha = commit, ""
        if commit:
            if not shutil.which("git"):
                raise Refused(f"{commit}: git is missing; install it with: sudo apt-get install git")
            if run(["git", "rev-parse", "--git-dir"], cwd=ROOT).returncode:
                raise Refused(f"{commit}: these sources are no clone of the repository, so there are no commits here")
            found = run(["git", "rev-parse", "--verify", "--quiet", commit + "^{commit}"], cwd=ROOT)
            if found.returncode:
                raise Refused(f"{commit}: git knows no such commit here")
            self.sha = found.stdout.strip()

    def __str__(self):
        return self.commit or "the working tree"

    @functools.lru_cache(None)
    def read(self, path):
        """The text of a file; None if it is not there."""
        path = os.path.join(self.folder(), path)
        return open(path).read() if os.path.exists(path) else None

    def folder(self):
        """Where all of the sources stand; those of a commit are unpacked once."""
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
        """Where bindings/library.cu is: in tools/ of older commits."""
        older = "tools/library.cu"
        return LIBRARY if self.read(older) is None else older

    @functools.lru_cache(None)
    def sources(self, program):
        """{path: text} of a program and what it includes by name."""
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
        """{name: ConfigLine} of configs.txt, as configs.cmake reads it, and what it says of bad lines."""
        name = not self.sha and os.environ.get("SDPA_CONFIGS") or "configs.txt"
        file = os.path.join(self.folder(), name)
        if not os.path.exists(file):
            raise Refused(f"{self} has no {name}, which lists one line a build")
        if not shutil.which("cmake"):
            raise Refused("cmake is missing, which reads configs.txt; install it with: sudo apt-get install cmake")
        done = run(["cmake", f"-DCONFIGS={file}", f"-DSOURCE={self.folder()}/sdpa.cu", "-P",
                    os.path.join(os.path.dirname(os.path.abspath(__file__)), "../configs.cmake")])
        lines = {}
        for name, base, expect, arch, knobs, gates in (line.split("\t") for line in done.stdout.splitlines()):
            knobs = shlex.split(knobs)
            words = knobs + ["arch=" + arch] * bool(arch) + ["expect=FAIL"] * (expect == "FAIL")
            lines[name] = ConfigLine(base, words, knobs, gates.split())
        if not lines and not done.stderr.strip():
            raise Refused(f"{file}: no configuration in it; a line is NAME KNOB=VALUE ...")
        return lines, done.stderr.strip()

    def config_lines(self):
        """The lines of the forward pass: the libraries that contenders are have no backward pass."""
        return {name: line for name, line in self.read_configs()[0].items() if not is_backward(line)}

    def knobs(self):
        """{knob: default}, from the rows of SDPA_KNOBS."""
        return {name: knob.default for name, knob in self.knob_rows().items()}

    @functools.lru_cache(None)
    def knob_rows(self, path="sdpa.cu"):
        """{name: Knob}; those that only backward lines have are sdpa_backward.cu's."""
        row = r'^  X\(([A-Z][A-Z_0-9]+), ([A-Z0-9_]*),(?: (\w+),)?[^"\n]*"([^"\n]*)"'
        return {name: Knob(*row) for name, *row in re.findall(row, self.read(path) or "", re.MULTILINE)}

    def refusals(self):
        """What of sdpa.cu judges knobs: section 1, the path to a kernel, and 7 without the model; as a program."""
        knobs, path, tables = ((self.read("sdpa.cu").split(since, 1) + [""])[1].split(until)[0] for since, until in (
            ("// ==== 1 KNOBS", "// ==== 2 PROBLEM"), ("// ---- the path to a kernel", "// ----"),
            ("// ==== 7 TABLES", "// ---- the choice")))
        if tables:
            tables = f"namespace {{\n//{path}\n//{tables}\n}}\n"
        return f"#include <array>\n#include <string_view>\n#include <type_traits>\n//{knobs}\n{tables}"

    def backward_refusals(self):
        """The same with what sdpa_backward.cu refuses besides."""
        text = self.read("sdpa_backward.cu")
        knobs, rules = (text.split(since, 1)[1].split(until)[0] for since, until in (
            ("// ==== 1 KNOBS", "// ==== 2"), ("// ==== 6 REFUSALS", "// ==== 7")))
        return f"{self.refusals()}\n//{knobs}\nnamespace {{\n//{rules}"

    def expression_trouble(self, word):
        """Why SCORE_MOD=... or MASK_MOD=... does not compile; "" if it does."""
        return run(["cmake", "-DEXPRESSION=" + word, f"-DSOURCE={self.folder()}/sdpa.cu", "-P",
                    os.path.join(os.path.dirname(os.path.abspath(__file__)), "../configs.cmake")]).stdout.strip()

    def refusal(self, words):
        """The sentence with which sdpa.cu refuses these knobs; "" if it does not."""
        return refusal_of(self.refusals(), tuple(sorted(definitions(words))))

    @functools.lru_cache(None)
    def program(self):
        """sdpa.cu without the harness and without comments."""
        text = self.read("sdpa.cu").split("// ==== COPY TO HERE")[0]
        stripped = run([CXX, "-fpreprocessed", "-dD", "-E", "-P", "-x", "c++", "-"], input=text)
        return text if stripped.returncode else stripped.stdout


def is_backward(line):
    """Whether a ConfigLine is built from sdpa_backward.cu."""
    return "BACKWARD=1" in line.knobs


def structs_of(header):
    """{name: struct of ctypes} of a C header. Members are int, float, int64_t, size_t, structs before theirs, and pointers."""
    kinds, structs = dict(int=ctypes.c_int, float=ctypes.c_float, int64_t=ctypes.c_int64, size_t=ctypes.c_size_t), {}
    text = " ".join(re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL).split())
    for name, body in re.findall(r"\bstruct (\w+) {(.*?)}", text):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            form = re.fullmatch(r"(?:const )?(\w+) (\*?\w+(?:, \*?\w+)*)", re.sub(r"\* (\w+)$", r" *\1", declaration))
            for member in form[2].split(", ") if form else [""]:
                kind = ctypes.c_void_p if member[:1] == "*" else form and (kinds | structs).get(form[1])
                if not kind:
                    raise Refused(f"{HEADER}: {name} has {declaration}; want int, float, int64_t, size_t, a struct that "
                                  "stands before it, or pointers")
                fields.append((member.strip("*"), kind))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


@functools.lru_cache(None)
def refusal_of(program, options):
    compiled = run([CXX, "-std=c++17", "-fsyntax-only", *options, "-x", "c++", "-"], input=program)
    return assertion_words(compiled.stderr)


def definitions(words):
    """The knobs among a line's words as a compiler takes them."""
    return ["-D" + word for word in words if not word.startswith(("expect=", "arch="))]


def changed(words, changes):
    """A line's words with these changes; each knob once."""
    names = [change.split("=")[0] for change in changes]
    return [word for word in words if word.split("=")[0] not in names] + list(changes)


def assertion_words(text):
    """The first refusal among a compiler's words; nvcc, clang++ and g++ say it each in their own way."""
    because = "(?: due to requirement '.*?')?"  # clang++ from 16 on has a colon behind it
    found = re.search(rf'static(?: assertion|_assert) failed{because}(?:: (.*)| .*?"(.*)")$', text, re.MULTILINE)
    return found[1] or found[2] if found else ""


# ---- contenders, as they are typed ----

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
        """Its name in rows."""
        return self.text.replace(" ", "__").replace("=", "_")

    @property
    def target(self):
        """A name that a program can have."""
        return re.sub(r"\W+", "_", self.label.rpartition(":")[2])

    @property
    def gates(self):
        return self.tree.config_lines()[self.name].gates

    @property
    def words(self):
        return changed(self.tree.config_lines()[self.name].words, self.changes)

    def knob(self, name, otherwise=""):
        return dict(word.split("=", 1) for word in self.words).get(name, otherwise)

    def runs_on(self, arch):
        """Of GPUs: an arch=89 runs on newer ones as well, an arch=90a on that alone."""
        own = self.knob("arch")
        return own in ("", arch) or own.isdigit() and int(arch.strip("a")) > int(own)

    def archs(self, wanted):
        """What it is compiled for, of these architectures, or if it runs on none of them."""
        return [arch for arch in wanted if self.runs_on(arch)] or [self.knob("arch")]

    def effective_knobs(self):
        """Every knob with its value, also those that keep their defaults."""
        defaults = [f"{knob}={value}" for knob, value in self.tree.knobs().items()]
        return sorted(word for word in changed(defaults, self.words) if word.split("=")[0] in self.tree.knobs())

    @property
    def D(self):
        return int(self.knob("HEAD_DIM", 64))

    @property
    def Dv(self):
        """Of V and O; 0: D."""
        return int(self.knob("HEAD_DIM_V", 0))

    @property
    def takes_fewer(self):
        """Whether a problem's D and Dv may be fewer, in multiples of 8."""
        return self.family == "wgmma"

    @property
    def dtype(self):
        """As rows have it: one type, or Q's and that of K and V."""
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
    """A kernel behind PyTorch's scaled_dot_product_attention, or of a package that takes PyTorch's tensors."""
    D = dtype = None  # any
    family, words, takes_fewer = "torch", (), True

    @property
    def backend(self):
        return self.text.partition(":")[2]

    @property
    def label(self):
        return self.text.replace(":", "_")


def parse_contenders(words):
    """Contenders in the order in which they are typed: a name begins one, KNOB=VALUE changes it."""
    found, trees = [], {}
    for word in words:
        if re.match(r"[A-Za-z_]\w*=", word):
            if not found or isinstance(found[-1], Torch):
                raise Refused(f"{word}: a changed knob stands behind the line that it changes")
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
    """The ConfigLine of a name. One that no line has is refused, as it was typed."""
    lines = tree.config_lines()
    if name in tree.read_configs()[0] and name not in lines:
        raise Refused(f"{typed}: a line of the backward pass, which the tools cannot load yet; build it by "
                      f"./run_all.sh --only '^{name}$' and run build/sdpa_{name}")
    if name not in lines:
        raise no_line(typed, name, lines)
    return lines[name]


def no_knob(knob, names, place=""):
    return f"no knob is called {knob}{place}; {nearest(knob, names) or 'the knobs are ' + ' '.join(names)}"


def names_matching(pattern, names, option="--only"):
    """Those of the names that match an option's regular expression; without any it is refused."""
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error:
        raise Refused(f"{option} {pattern}: not a regular expression") from None
    if not found:
        raise Refused(f"{option} {pattern}: no line of configs.txt has such a name")
    return found


def lines_named(pattern, option="--only"):
    """The lines of the forward pass whose name matches an option's regular expression."""
    tree = Tree()
    found = names_matching(pattern, tree.read_configs()[0], option)
    forward = [Line(tree, name) for name in found if name in tree.config_lines()]
    if not forward:
        config_line(tree, found[0], f"{option} {pattern}")
    return forward


def has_bad_lines():
    """Whether configs.txt has lines that cannot be read. Says what is wrong with them."""
    sentences = Tree().read_configs()[1]
    if sentences:
        say(sentences)
    return bool(sentences)


def change_line(line, word):
    """The line with one knob more changed."""
    knob = word.split("=")[0]
    if knob in ("expect", "arch") or not (knob in EXPRESSIONS or re.fullmatch(r"[A-Za-z_]\w*=[A-Za-z0-9_]+", word)):
        raise Refused(f"{word} is no knob")
    if knob in line.tree.knob_rows("sdpa_backward.cu"):
        raise Refused(f"{word}: for a line of configs.txt that is built from sdpa_backward.cu; the tools cannot load those yet")
    if knob not in line.tree.knobs():
        raise Refused(f"{word}: {no_knob(knob, line.tree.knobs(), f' in {line.tree}')}")
    trouble = line.tree.expression_trouble(word) if knob in EXPRESSIONS else ""
    if trouble:
        raise Refused(trouble)
    if isinstance(line, Cublas) and knob not in ("DTYPE", "HEAD_DIM"):
        raise Refused(f"{word}: of the knobs cublas has DTYPE and HEAD_DIM")
    return type(line)(line.tree, line.name, tuple(changed(line.changes, [word])))


def loadable(tree):
    """The tree, if its lines can be loaded as libraries."""
    missing = [name for name in LIBRARY_FUNCTIONS if name + "(" not in (tree.read(tree.library) or "")]
    if missing:
        raise Refused(f"{tree}: its {tree.library} has no {missing[0]}, so its lines cannot be loaded")
    return tree


# ---- building ----

def nvcc(tool="nvcc"):
    """Where it is, or another tool of the CUDA Toolkit; None if it is nowhere."""
    return shutil.which(tool) or shutil.which(os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", tool))


# A line as a library: where it is, or why it is not.
Built = namedtuple("Built", "line path trouble log", defaults=("", "", ""))


def build(lines, *archs, program=LIBRARY, kind="-shared", progress=lambda *_: None):
    """{line: Built} for all of these lines, as libraries, as device code alone (kind="-fatbin") or as another program
    that includes sdpa.cu (kind=""), compiled for these architectures unless the line names its own."""
    if not nvcc():
        raise Refused("nvcc is missing; install the CUDA Toolkit 12.4 or newer, or put its bin folder on PATH")
    lines, built = list(dict.fromkeys(lines)), {}
    with ThreadPoolExecutor(JOBS) as pool:
        for one in pool.map(functools.partial(build_one, archs=archs, program=program, kind=kind), lines):
            built[one.line] = one
            progress(len(built), len(lines), one.line.text)
    return built


def show_progress():
    """For build() and cmake_build(): "built 7 of 81, 30 s left: NAME" on stderr, on a terminal in one place."""
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
               # nvcc takes the words between commas for several macros.
               *sorted(word.replace(",", r"\,") for word in definitions(line.words)), *of_kind[kind]]
    if line.family == "cublas" and kind != "-fatbin":
        folder = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(nvcc()))), "lib64")
        options += ["-lcublas", "-Xlinker=-rpath=" + folder]
    version = run([nvcc(), "--version"]).stdout
    # A comment, or the harness, which a library does not have, compiles nothing again.
    texts = [line.tree.program() if path == "sdpa.cu" else text for path, text in sources.items()
             if path not in ("harness.cu", "harness_backward.cu", "reference.cpp")] if is_line else sources.values()
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
    """The option that gives locals without a value a pattern, for a compiler that has it: g++ from 12 on, clang++."""
    option = "-ftrivial-auto-var-init=pattern"
    return [option] if not run([CXX, option, "-fsyntax-only", "-x", "c++", "-"], input="").returncode else []


def host_library(*knobs, program=LIBRARY):
    """bindings/library.cu, or a program that includes it, with these knobs compiled for the CPU backend."""
    backend = ["cpu_backend/" + name for name in sorted(os.listdir(os.path.join(ROOT, "cpu_backend")))]
    texts = [*Tree().sources(program).values(), *map(Tree().read, backend)]
    path = os.path.join(BUILD, "engine", f"host-{digest(program, *knobs, *texts)}.so")
    trouble = compile_once(path, [
        CXX, "-std=c++17", "-O1", "-ffp-contract=off", *auto_var_init(), "-w", "-pthread", "-fPIC", "-shared",
        "-Icpu_backend", *definitions(knobs), "-x", "c++", program, "cpu_backend/engine.cpp"], ROOT)
    if trouble:
        raise Refused(f"{program} does not compile: {trouble}", 3)
    return path


def compile_once(path, command, folder):
    """Compiles what is not there yet, its words into path.log; the sentence why it does not compile, "" if it does."""
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
    """Builds the lines that the options select in a folder by CMake. Returns the finished process."""
    options = dict(SDPA_TESTS="OFF", SDPA_KEEP_GOING=keep_going, SDPA_ARCHS=os.environ.get("SDPA_ARCHS", ""),
                   SDPA_CONFIGS=os.path.join(ROOT, os.environ.get("SDPA_CONFIGS") or "configs.txt")) | options
    generator = {"CMAKE_GENERATOR": "Ninja"} if shutil.which("ninja") else {}  # of a new folder
    os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise Refused(f"{folder}: no folder that can be written to; set SDPA_BUILD_DIR to one")
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
    """Writes a file that is there whole or not at all."""
    new = own_name(path)
    try:
        with open(new, "w") as out:
            out.write(text)
    except OSError as error:
        error.filename = path  # which a failed write() lacks
        raise
    os.rename(new, path)


def own_name(path):
    """A name beside it that no other thread takes."""
    return f"{path}.{os.getpid()}-{threading.get_ident()}"


def digest(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def compiler_words(log):
    """The sentence to show for a line that did not compile. Raises if it did not for want of room."""
    refuse_full_disk(log, BUILD)
    errors = [line for line in log.splitlines() if re.search("error|fatal", line)]
    return assertion_words(log) or (errors or log.strip().splitlines()[-1:] or ["the compiler said nothing"])[0]


# ---- what a library takes of an SM, and whether two are the same ----

MIX = {"tensor": r"HMMA|HGMMA|QGMMA|IMMA", "MUFU": "MUFU", "FFMA": "FFMA", "LDS": r"LDSM?[. ]", "BAR": "BAR|SYNCS",
       "instructions": ""}


@dataclass
class Facts:
    """Of a library, from it and from what ptxas said of it."""
    registers: int = 0  # of its kernels the most
    spilled: int = 0    # bytes
    archs: tuple = ()
    wgmma: tuple = ()  # ptxas's codes where wgmma is not as written: C7510 serialized, C7519 an arrive put in
    threads: int = 0
    shared_bytes: int = 0
    block_m: int = 0
    code_bytes: int = 0
    code: str = ""  # equal if the machine code is
    same: str = ""  # equal if that is, and the program that launches it
    path: str = ""

    @property
    def mix(self):
        """How many instructions of each kind its kernels have; nothing without cuobjdump. It takes a second."""
        words = run(["cuobjdump", "-sass", self.path]).stdout if self.path and shutil.which("cuobjdump") else ""
        code = re.findall(r"^ +/\*[0-9a-f]{4,}\*/ +(?:@!?U?P[0-9T]+ +)?(?!NOP)([A-Z][^;]*);", words, re.MULTILINE)
        return {kind: sum(bool(re.match(pattern, text)) for text in code) for kind, pattern in MIX.items() if code}


def facts(built):
    with open(built.path, "rb") as file:
        data = file.read()
    code = [section.hex() for section in machine_code(data)]
    return Facts(*ptxas_report(built.log), *launch_of(data), sum(map(len, code)) // 2, digest(*code),
                 digest(*code, built.line.tree.program(), *built.line.effective_knobs()), built.path)


def ptxas_report(log):
    """The most registers and bytes spilled of its kernels, their architectures, and codes of what it says of wgmma."""
    registers = map(int, re.findall(r"Used (\d+) registers", log))
    spilled = [int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)]
    words = (re.findall(pattern, log) for pattern in (r"Compiling entry .* for 'sm_(\w+)'", r"\((C75\d\d)\)"))
    return max(registers, default=0), max(spilled, default=0), *(tuple(sorted(set(found))) for found in words)


def machine_code(data):
    """The instructions in an object file or a library, without names, line numbers and checksums of the source."""
    return [section.data() for cubin in embedded(data) for section in cubin.iter_sections()
            if section.name.startswith(".text.")]


def embedded(data):
    """The ELF files inside a file: the device code, for each architecture."""
    starts = [one.start() for one in re.finditer(b"\x7fELF", data)]
    return [elf for elf in (ELFFile(io.BytesIO(data[at:])) for at in starts if at) if elf["e_machine"] == "EM_CUDA"]


def symbol(elf, table, name):
    """A symbol's entry; None if it is not there."""
    found = elf.get_section_by_name(table).get_symbol_by_name(name)
    return found[0].entry if found else None


def launch_of(data):
    """Threads, bytes of shared memory and BLOCK_M: a constant of device code alone, sizes of symbols of a library."""
    for cubin in embedded(data):
        if found := symbol(cubin, ".symtab", "sdpa_library_launch"):
            return struct.unpack_from("<3i", cubin.get_section_by_name(".nv.constant3").data(), found.st_value)
    found = [symbol(ELFFile(io.BytesIO(data)), ".dynsym", "sdpa_library_" + name)
             for name in ("threads", "smem_bytes", "block_m")]
    return [one.st_size if one else 0 for one in found]
