#!/usr/bin/env python3
"""Writes the kernel of one line of configs.txt without knobs. ./run_all.sh extract runs it.

The source is cut into declarations and statements. Every condition that depends on Build alone is asked
of g++, which compiles sdpa.cu with the line's knobs as the CPU backend does; the branches that it decides
are resolved, the template parameter B becomes Build, and what nobody names any more is dropped. Nothing
here knows a function, a kernel or a knob by name. What cannot be resolved ends in one sentence, and
the result counts only if nvcc gives the line's machine code for it.
"""

import argparse
import difflib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = "// ==== COPY FROM HERE", "// ==== COPY TO HERE"


class Refusal(Exception):
    """One sentence for the user, and the exit code that goes with it."""

    def __init__(self, sentence, code=2):
        super().__init__(sentence)
        self.code = code


# ---- the lines of configs.txt ----


def known_knobs(source):
    """{name: meaning} of the rows of SDPA_KNOBS."""
    rows = re.findall(r'^  X\(([A-Z0-9_]+), [^"]*"[^"]*", "([^"]*)"\)', source, re.M)
    if not rows:
        raise Refusal("sdpa.cu has no row of SDPA_KNOBS that this tool can read")
    return dict(rows)


class Line:
    """One line of configs.txt: its knobs, and what it is for."""

    def __init__(self, path, wanted, knobs):
        if not os.path.exists(path):
            raise Refusal(f"{path}: there is no such file; it lists one configuration a line")
        names = []
        with open(path, encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                words = text.split("#")[0].split()
                if not words:
                    continue
                names.append(words[0])
                if words[0] == wanted:
                    self.read(words, f"{os.path.basename(path)}:{number}", knobs)
                    return
        near = difflib.get_close_matches(wanted, names, 5, 0.5) or names
        raise Refusal(f"{wanted}: no line of {os.path.basename(path)} has that name; there are, for "
                      f"example, {' '.join(near[:8])}")

    def read(self, words, where, knobs):
        self.name, self.knobs, self.arch, self.expect = words[0], [], "", "PASS"
        for word in words[1:]:
            if word.startswith("gate:"):  # what ./run_all.sh gates judges
                continue
            match = re.fullmatch(r"([A-Za-z_]+)=([A-Za-z0-9_]+)", word)
            if not match:
                raise Refusal(f"{where}: '{word}' is not KNOB=VALUE (letters, digits and _ only)")
            key, value = match.groups()
            if key == "expect":
                self.expect = value
            elif key == "arch":
                self.arch = value
            elif key in knobs:
                self.knobs.append(word)
            else:
                raise Refusal(f"{where}: no knob is called {key}")


# ---- tokens ----


class Token:
    """kind: ws, nl, com, pp, id, num, str or op. column: where it stood in the source."""

    __slots__ = ("kind", "text", "column")

    def __init__(self, kind, text, column=-1):
        self.kind, self.text, self.column = kind, text, column


LEXER = re.compile(
    r"(?P<nl>\n)|(?P<ws>[ \t]+)|(?P<com>//[^\n]*|/\*.*?\*/)|(?P<str>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<id>[A-Za-z_]\w*)|(?P<num>\.?\d(?:[\w.]|'\d|[eEpP][+-])*)"
    r"|(?P<op>::|->|\.\.\.|\+\+|--|&&|\|\||<<=|<<|[-+*/%&|^=!<>]=|[^\w\s])", re.S)
DIRECTIVE = re.compile(r"#(?:[^\n\\]|\\.|\\\n)*", re.S)
TRIVIA = ("ws", "nl", "com", "pp")
PAIRS = {"(": ")", "[": "]", "{": "}"}


def tokenize(text):
    tokens, i, line_start = [], 0, 0
    while i < len(text):
        blank_before = text[line_start:i].strip() == ""
        match = DIRECTIVE.match(text, i) if blank_before and text[i] == "#" else LEXER.match(text, i)
        if not match:
            raise Refusal(f"extract cannot read sdpa.cu here: {text[i:i + 40]!r}", 1)
        kind = match.lastgroup or "pp"
        tokens.append(Token(kind, match.group(), i - line_start))
        i = match.end()
        newline = text.rfind("\n", 0, i)
        line_start = newline + 1
    return tokens


def text_of(tokens):
    return "".join(t.text for t in tokens)


def code_of(tokens):
    return [t for t in tokens if t.kind not in TRIVIA]


def plain(tokens):
    """One line of text without comments, as it is asked of g++."""
    return re.sub(r"\s+", " ", text_of([t for t in tokens if t.kind not in ("com", "pp")])).strip()


def previous(tokens, i):
    """Text of the last code token before i, or ''."""
    i -= 1
    while i >= 0 and tokens[i].kind in TRIVIA:
        i -= 1
    return tokens[i].text if i >= 0 else ""


def following(tokens, i):
    """Index of the first code token from i on, or len(tokens)."""
    while i < len(tokens) and tokens[i].kind in TRIVIA:
        i += 1
    return i


def opens_angle(tokens, i):
    """Whether the < at i opens template arguments: it touches a name, as clang-format leaves it."""
    if tokens[i].text != "<" or i == 0:
        return False
    return tokens[i - 1].kind == "id" or previous(tokens, i) == "template"


def match(tokens, i):
    """Index of the bracket that closes the one at i."""
    if tokens[i].text == "<":
        depth = 0
        while i < len(tokens):
            text = tokens[i].text
            if text in PAIRS:
                i = match(tokens, i)
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return i
            i += 1
    else:
        close, j = PAIRS[tokens[i].text], i + 1
        while j < len(tokens):
            if tokens[j].text in PAIRS:
                j = match(tokens, j)
            elif tokens[j].text == close:
                return j
            j += 1
    raise Refusal("extract finds a bracket in sdpa.cu that is never closed", 1)


def top_level(tokens, start=0):
    """Indices of the code tokens outside of all brackets; an opening bracket counts as outside."""
    i = start
    while i < len(tokens):
        if tokens[i].kind not in TRIVIA:
            yield i
            if i + 1 < len(tokens) and (tokens[i].text in PAIRS or opens_angle(tokens, i)):
                i = match(tokens, i)
        i += 1


def split(tokens, separators):
    """The parts between top-level separators, and the separators."""
    if not any(t.text in separators for t in tokens):  # the rule, and a walk takes long
        return [tokens], []
    parts, found, start = [], [], 0
    for i in top_level(tokens):
        if tokens[i].text in separators:
            parts.append(tokens[start:i])
            found.append(tokens[i])
            start = i + 1
    return parts + [tokens[start:]], found


def strip(tokens):
    start, end = 0, len(tokens)
    while start < end and tokens[start].kind in ("ws", "nl"):
        start += 1
    while end > start and tokens[end - 1].kind in ("ws", "nl"):
        end -= 1
    return tokens[start:end]


def literal(tokens):
    """The only token if it is true, false or a number, perhaps in parentheses; else None."""
    code = code_of(tokens)
    while len(code) > 2 and code[0].text == "(" and match(code, 0) == len(code) - 1:
        code = code[1:-1]
    if len(code) == 1 and (code[0].kind == "num" or code[0].text in ("true", "false")):
        return code[0].text
    return None


def truth(tokens):
    return {"true": True, "false": False}.get(literal(tokens))


# ---- declarations and statements ----


class Node:
    """A declaration or a statement.

    kind   comment, pp, define (#define and #undef of a macro with arguments), macro (a use of one as a
           declaration), verbatim (a function's body with uses of them, in one piece), simple, namespace,
           struct, enum, function, block, if, loop
    lead   what stands before it: line ends, comments, #pragma
    head   its tokens up to the body, or all of them
    body   nodes inside of { }; `close` is what stands before the }, `tail` the } and what follows
    then   the statement of an if or a loop; `other` that of an else, after the tokens `between`
    trail  a comment behind it on the same line; `note` one behind the {
    """

    def __init__(self, kind, lead, head):
        self.kind, self.lead, self.head = kind, lead, head
        self.body = self.then = self.other = None
        self.note, self.close, self.tail, self.between, self.trail = [], [], [], [], []
        self.hoist = False

    def copy(self):
        node = Node(self.kind, self.lead, self.head)
        node.__dict__.update(self.__dict__)
        return node

    def children(self):
        return (self.body or []) + [n for n in (self.then, self.other) if n]

    def tokens(self):
        """In order, as written."""
        parts = [self.lead, self.head, self.note]
        if self.then:
            parts += [self.then.tokens(), self.between]
            parts += [self.other.tokens()] if self.other else []
        if self.body is not None:
            parts += [n.tokens() for n in self.body] + [self.close]
        return [t for part in parts + [self.tail, self.trail] for t in part]

    def template(self):
        """[(parameter tokens, name)] of its template header, or None."""
        code = code_of(self.head)
        if not code or code[0].text != "template":
            return None
        inside = [t for t in self.head[: match(self.head, self.angle())]][self.angle() + 1:]
        return [(p, [t for t in code_of(split(p, "=")[0][0]) if t.kind == "id"][-1].text)
                for p in split(inside, ",")[0] if code_of(p)]

    def angle(self):
        return next(i for i, t in enumerate(self.head) if t.text == "<")

    def after_template(self):
        """Index in head of the first code token behind the template header."""
        start = following(self.head, 0)
        if start < len(self.head) and self.head[start].text == "template":
            start = following(self.head, match(self.head, self.angle()) + 1)
        return start


class Parser:
    """Cuts tokens into nodes: declarations in a namespace or struct, statements in a function."""

    def __init__(self, tokens, macros):
        self.t, self.i, self.macros = tokens, 0, macros

    def nodes(self, in_function, end):
        """The nodes up to index `end`, and the trivia that is left before it."""
        found = []
        while True:
            start = self.i
            while self.i < end and self.t[self.i].kind in TRIVIA:
                self.i += 1
            lead = self.t[start:self.i]
            if self.i >= end:
                if not in_function:
                    lead = self.standalone(lead, found, True)
                return found, lead
            if not in_function:
                lead = self.standalone(lead, found, False)
            node = self.statement(end) if in_function else self.declaration(end)
            node.lead = lead + node.lead
            j = self.i
            while j < end and self.t[j].kind == "ws":
                j += 1
            if j < end and self.t[j].kind == "com":
                node.trail = self.t[self.i:j + 1]
                self.i = j + 1
            found.append(node)

    @staticmethod
    def standalone(lead, found, is_end):
        """Makes nodes of the directives in lead and of its comments that a blank line sets apart."""
        start, newlines, has_comment = 0, 0, False
        for i, token in enumerate(lead):
            if token.kind == "nl":
                newlines += 1
                if newlines >= 2 and has_comment:
                    cut = i - 1 if lead[i - 1].kind == "nl" else i
                    found.append(Node("comment", lead[start:cut], []))
                    start, has_comment = cut, False
            elif token.kind == "com":
                newlines, has_comment = 0, i >= start
            elif token.kind == "pp":
                is_macro = re.match(r"#\s*(define|undef)\b", token.text)
                found.append(Node("define" if is_macro else "pp", lead[start:i], [token]))
                start, newlines, has_comment = i + 1, 0, False
                if is_macro and text_of(lead[start:]).startswith("\n// clang-format on"):
                    found[-1].trail, start = lead[start:start + 2], start + 2
        if is_end and has_comment:
            cut = max(i for i, t in enumerate(lead) if t.kind == "com") + 1
            found.append(Node("comment", lead[start:cut], []))
            start = cut
        return lead[start:]

    def take(self, end):
        tokens = self.t[self.i:end]
        self.i = end
        return tokens

    def to_semicolon(self, end):
        for i in top_level(self.t, self.i):
            if i >= end:
                break
            if self.t[i].text == ";":
                return i + 1
        raise Refusal(f"extract finds no end of this in sdpa.cu: {plain(self.t[self.i:self.i + 25])}", 1)

    def braces(self, node, in_function, end):
        """The body of a node whose head ends in the { that was just taken."""
        close = match(self.t, self.i - 1)
        j = self.i
        while self.t[j].kind == "ws":
            j += 1
        if self.t[j].kind == "com":
            node.note = self.take(j + 1)
        node.body, node.close = self.nodes(in_function, close)
        node.tail = self.take(close + 1)
        return node

    def declaration(self, end):
        t, first = self.t, self.i
        if t[first].text in self.macros:
            after = following(t, first + 1)
            if t[after].text == "(":
                stop = match(t, after) + 1
                if following(t, stop) < end and t[following(t, stop)].text == ";":
                    stop = following(t, stop) + 1
                return Node("macro", [], self.take(stop))
        if t[first].text in ("public", "private", "protected") and t[first + 1].text == ":":
            return Node("simple", [], self.take(first + 2))
        start = first
        if t[start].text == "template":
            start = following(t, match(t, following(t, start + 1)) + 1)
        kind = t[start].text
        if kind in ("inline",) and t[following(t, start + 1)].text == "namespace":
            kind = "namespace"
        parens = False
        for i in top_level(t, start):
            if i >= end:
                break
            text, before = t[i].text, previous(t, i)
            if text == ";" or (text == "=" and before != "operator"):
                break
            parens = parens or text == "("
            if text != "{":
                continue
            if kind == "namespace" or kind in ("struct", "class", "union") and not parens:
                node = self.braces(Node("namespace" if kind == "namespace" else "struct", [],
                                        self.take(i + 1)), False, end)
                if node.kind == "struct":
                    node.tail += self.take(self.to_semicolon(end))
                return node
            if kind == "enum":
                return Node("enum", [], self.take(self.to_semicolon(end)))
            if parens and (before in (")", "}", "const", "noexcept", "override")):
                node, close = Node("function", [], self.take(i + 1)), match(t, i)
                if any(u.text in self.macros for u in t[i:close] if u.kind == "id"):
                    node.body, node.tail = [Node("verbatim", [], self.take(close))], self.take(close + 1)
                    return node
                return self.braces(node, True, end)
            if not parens:
                break
        return Node("simple", [], self.take(self.to_semicolon(end)))

    def statement(self, end):
        t, first = self.t, self.i
        text = t[first].text
        if text == "{":
            return self.braces(Node("block", [], self.take(first + 1)), True, end)
        if text in ("if", "for", "while", "switch"):
            open_ = next(i for i in range(first, end) if t[i].text == "(")
            node = Node("if" if text == "if" else "loop", [], self.take(match(t, open_) + 1))
            node.then = self.inner(end)
            if text == "if":
                after = following(t, self.i)
                if after < end and t[after].text == "else":
                    node.between = self.take(after + 1)
                    node.other = self.inner(end)
            return node
        if text == "do":
            node = Node("loop", [], self.take(first + 1))
            node.then = self.inner(end)
            node.tail = self.take(self.to_semicolon(end))
            return node
        if text in ("try", "goto"):
            raise Refusal(f"extract does not know the statement '{text}'", 1)
        return Node("simple", [], self.take(self.to_semicolon(end)))

    def inner(self, end):
        lead = self.take(following(self.t, self.i))
        node = self.statement(end)
        node.lead = lead
        return node


def declared_names(node):
    """The names that a declaration makes."""
    start = node.after_template()
    code = code_of(node.head[start:])
    if node.kind == "define":
        return [re.match(r"#\s*\w+\s+(\w+)", node.head[0].text).group(1)]
    if not code or node.kind in ("comment", "pp", "macro", "verbatim"):
        return []
    if node.kind == "namespace":
        return []
    if code[0].text in ("struct", "class", "union", "enum"):
        rest = [t for t in code[1:] if t.text not in ("class", "struct")]
        return [rest[0].text] if rest and rest[0].kind == "id" else []
    if code[0].text in ("using", "namespace"):
        return [code[1].text] if len(code) > 2 and code[2].text == "=" else []
    if code[0].text in ("static_assert", "public", "private", "protected", "friend"):
        return []
    if any(t.text == "operator" for t in code):
        return ["operator"]
    name = function_name(node)
    if name:
        return [name]
    return [name for name, _ in declarators(node.head[start:])]


def function_name(node):
    """Of a function or its declaration: the name whose parentheses are followed by its end."""
    head = node.head
    for i in top_level(head, node.after_template()):
        if head[i].text in ("=", "{"):
            return None
        if head[i].text == "(":
            after = following(head, match(head, i) + 1)
            ends = head[after].text if after < len(head) else ""
            if ends in ("{", "const", "noexcept", ":", ";", "->", "="):
                name = previous(head, i)
                return name if re.match(r"~?\w", name) else None
    return None


def declarators(tokens):
    """[(name, initializer tokens or None)] of a variable declaration `T a = x, b[n];`."""
    if not tokens or strip(tokens)[-1].text != ";" or code_of(tokens)[0].text in (
            "return", "throw", "delete", "goto", "using", "typedef"):
        return []
    found = []
    for part in split(strip(tokens)[:-1], ",")[0]:
        name, init, before = None, None, ""
        for i in top_level(part):
            text = part[i].text
            if text == "{" and name in ("struct", "union", "class", "enum"):
                continue
            if text == "=" or text in PAIRS:
                init = part[i + 1:] if text == "=" else None
                if text == "(":
                    return []
                break
            if part[i].kind == "id":
                name, before = text, previous(part, i)
        type_before = before and (before[-1].isalnum() or before[-1] in "_>&*}")
        if name is None or (not type_before if not found else before not in ("", "*", "&")):
            return []
        found.append((name, init))
    return found


# ---- the copy region ----


def copy_region(source):
    if source.count(BEGIN) != 1 or source.count(END) != 1:
        raise Refusal(f"sdpa.cu does not have the lines '{BEGIN}' and '{END}' once each")
    begin, end = source.index(BEGIN), source.index(END)
    return source[source.index("\n", begin) + 1: end]


def condition(text, macros, knobs, given):
    """Of an #if whose names are all knobs or SDPA_...: True or False; of one with none of them None."""
    names = [n for n in re.findall(r"\b[A-Za-z_]\w*", text) if n != "defined"]
    ours = [n for n in names if n in knobs or n.startswith("SDPA_")]
    if not ours:
        return None
    values = {n: "1" for n in macros if n.startswith("SDPA_")}
    values.update({n: v if v.isdigit() else "0" for n, v in given.items()})
    values.update({n: text_of(v) for n, v in macros.items() if v and text_of(v).isdigit()})
    text = re.sub(r"defined\s*\(?\s*(\w+)\s*\)?", lambda m: str(int(m.group(1) in {**macros, **given})), text)
    text = re.sub(r"\b[A-Za-z_]\w*", lambda m: values.get(m.group(), "0"), text)
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    if len(ours) != len(names) or not re.fullmatch(r"(\s|\d|[()<>=!+*-]|and|or|not)*", text):
        return "?"
    return bool(eval(text, {"__builtins__": {}}))  # digits and operators alone


def resolve_directives(tokens, knobs, given):
    """Drops what conditionals on knobs and SDPA_... macros leave out, and the definitions of macros without
    arguments. Returns the rest and the names of the macros that take arguments."""
    kept, macros = [], {}
    conditionals = []  # of each open #if: "ours", what it takes; or "theirs" for one that stays

    def taken():
        return all(c[1] for c in conditionals)

    for token in tokens:
        if token.kind != "pp":
            if taken():
                kept.append(token)
            continue
        text = re.sub(r"\\\n", " ", token.text)
        word, _, rest = re.match(r"#\s*(\w+)(\s*)(.*)", text, re.S).groups()
        rest = re.sub(r"//.*", "", rest).strip()
        if word in ("if", "ifdef", "ifndef"):
            decision = condition({"if": "", "ifdef": "defined ", "ifndef": "!defined "}[word] + rest, macros, knobs,
                                 given)
            if decision == "?":
                raise Refusal(f"extract cannot decide the line: {token.text}", 1)
            if decision is not None:
                conditionals.append(["ours", decision])
                continue
            conditionals.append(["theirs", True])
            if taken():
                kept.append(token)
        elif word in ("else", "elif", "endif"):
            if not conditionals:
                raise Refusal(f"extract finds no #if for the line: {token.text}", 1)
            if conditionals[-1][0] == "theirs":
                if taken():
                    kept.append(token)
            elif word == "elif":
                raise Refusal(f"extract cannot decide the line: {token.text}", 1)
            else:
                conditionals[-1][1] = not conditionals[-1][1]
            if word == "endif":
                conditionals.pop()
        elif not taken():
            continue
        elif word == "define":
            name, arguments, value = re.match(r"(\w+)(\([^)]*\))?\s*(.*)", rest, re.S).groups()
            macros[name] = None if arguments else tokenize(value)
            if arguments:
                kept.append(token)
        else:
            if word == "pragma" and rest.startswith("nv_diag_suppress"):
                token = Token("pp", f"#pragma {rest}  // members that one use of a template leaves alone")
            kept.append(token)
    expanded = []
    for token in kept:
        replacement = macros.get(token.text) if token.kind == "id" else None
        if token.kind == "com":
            token.text = re.sub(r"\w+", lambda m: text_of(macros.get(m.group()) or []) or m.group(), token.text)
        expanded += replacement if replacement else [token]
    return expanded, {name for name, value in macros.items() if value is None}


# ---- what g++ says about constants ----


class Oracle:
    """Values of constant expressions over Build. ask() notes an expression that it does not know;
    answer() compiles all of them at once."""

    def __init__(self, knobs, compiler):
        self.compiler, self.values, self.open = compiler, {}, {}
        self.directory = tempfile.TemporaryDirectory()
        self.command = [compiler, "-std=c++17", "-O0", "-w", "-fmax-errors=0", "-I" + self.directory.name, "-I" + ROOT,
                        "-I" + os.path.join(ROOT, "simt"), "-DSDPA_NO_MAIN"] + ["-D" + knob for knob in knobs]
        # Compiled once: g++ takes what lies there as sdpa.cu.gch for #include "sdpa.cu".
        result = self.compile("-x", "c++-header", os.path.join(ROOT, "sdpa.cu"), "-o", self.path("sdpa.cu.gch"))
        if result.returncode:
            self.refuse(result.stderr)

    def path(self, name):
        return os.path.join(self.directory.name, name)

    def compile(self, *arguments):
        return subprocess.run([*self.command, *arguments], capture_output=True, text=True, check=False)

    def ask(self, expression):
        """None (not known yet, or no constant), a bool or an int."""
        if expression not in self.values:
            self.open[expression] = None
            return None
        return self.values[expression]

    def answer(self):
        """Whether there was something to answer."""
        if not self.open:
            return False
        asked = sorted(self.open)
        self.open = {}
        alive = list(range(len(asked)))
        while True:
            with open(self.path("probe.cu"), "w", encoding="utf-8") as file:
                file.write('#include "sdpa.cu"\nnamespace SDPA_NAMESPACE { namespace {\n')
                first = 3
                for number in alive:
                    file.write(f"constexpr long long extract_value_{number} = (long long)({asked[number]}); "
                               f"constexpr long long extract_kind_{number} = "
                               f"std::is_same<decltype({asked[number]}), bool>::value ? 1 : "
                               f"std::is_integral<decltype({asked[number]})>::value ? 2 : 3;\n")
                file.write("} }\nextern const long long extract_answers[];\n"
                           "const long long extract_answers[] = {" + ", ".join(
                               f"SDPA_NAMESPACE::extract_value_{n}, SDPA_NAMESPACE::extract_kind_{n}"
                               for n in alive) + "};\n")
            result = self.compile("-S", "-x", "c++", self.path("probe.cu"), "-o", self.path("probe.s"))
            if result.returncode == 0:
                break
            bad = {int(n) - first for n in re.findall(r"probe\.cu:(\d+):\d+:", result.stderr)}
            bad = {alive[b] for b in bad if 0 <= b < len(alive)}
            if not bad:
                self.refuse(result.stderr)
            alive = [n for n in alive if n not in bad]
            for number in bad:
                self.values[asked[number]] = None
        with open(self.path("probe.s"), encoding="utf-8") as file:
            listing = file.read()
        listing = listing[listing.index("\nextract_answers:"):].split("\n", 2)[2]
        numbers = []
        for line in listing.split("\n"):
            word = line.split()
            if word[:1] == [".quad"] or word[:1] == [".xword"] or word[:1] == [".8byte"]:
                numbers.append(int(word[1], 0))
            elif word[:1] == [".zero"]:
                numbers += [0] * (int(word[1]) // 8)
            else:
                break
        if len(numbers) != 2 * len(alive):
            raise Refusal(f"extract cannot read what {self.compiler} says about the constants", 1)
        for at, number in enumerate(alive):
            value, kind = numbers[2 * at:2 * at + 2]
            self.values[asked[number]] = bool(value) if kind == 1 else value if kind == 2 else None
        return True

    def refuse(self, words):
        said = re.search(r"static assertion failed: (.*)", words)
        if said:
            raise Refusal(f"the line does not compile: {said.group(1)}")
        error = re.search(r".*error.*", words)
        raise Refusal(f"{self.compiler} does not compile sdpa.cu with these knobs: "
                      f"{error.group(0) if error else words[:300]}")


# ---- resolving what Build decides ----

CONSTANT_WORDS = {"sizeof", "true", "false", "int", "unsigned", "bool", "float", "static_cast", "long",
                  "int64_t", "uint32_t", "size_t", "std"}


class Scope:
    """What names mean at a place: template parameters, members of the struct, locals."""

    def __init__(self, outer=None):
        self.B = outer.B if outer else False
        self.hidden = set(outer.hidden) if outer else set()     # no constants of Build
        self.constants = dict(outer.constants) if outer else {}  # name: expression for g++
        self.replaced = dict(outer.replaced) if outer else {}    # name: tokens to write instead
        self.dependent = outer.dependent if outer else False  # on a parameter that is not B

    def hide(self, name):
        self.hidden.add(name)
        self.constants.pop(name, None)
        self.replaced.pop(name, None)

    def parameters(self, node):
        for tokens, name in node.template() or []:
            if name == "B" and code_of(tokens)[0].text in ("class", "typename"):
                self.B = True
            else:
                self.hide(name)
                self.dependent = True


class Folder:
    """Rewrites nodes so that nothing is left that Build decides."""

    def __init__(self, nodes, oracle):
        self.oracle = oracle
        self.constant_names, self.specialized, self.empty = {"Build"}, {}, set()
        self.wrappers = {}  # templates of functions without arguments: what a call stands for
        self.remarks = {}  # of the enumerators, by Enum::name: the comment behind it
        self.chose_first = False  # whether the last wrapper took the first branch of an if
        self.undecided = None  # a function that has a branch which nothing decides
        self.aliases = {}  # of the templates `using X = ...` that became plain names
        self.types = set()
        for node in walk_scopes(nodes):
            names = declared_names(node)
            code = [t.text for t in code_of(node.head)]
            if node.kind in ("struct", "enum") or code[:1] == ["using"]:
                self.constant_names.update(names)
                self.types.update(names)
            elif "constexpr" in code:
                self.constant_names.update(names)
            elif code and code[0] == "template" and "using" in code:
                self.constant_names.update(names)
            if node.kind == "function" and node.template() is not None and "void" in code:
                if code[-3:] == ["(", ")", "{"] and code[-4] == names[0]:
                    self.wrappers[names[0]] = node
            if node.kind == "enum":
                self.remarks.update(enumerator_comments(node))
            if node.kind == "struct" and node.template() is not None:
                for name in names:
                    self.specialized.setdefault(name, []).append(node)
        for name, versions in list(self.specialized.items()):
            if not any(self.arguments(v) for v in versions):
                del self.specialized[name]

    @staticmethod
    def arguments(node):
        """Of a specialization `struct X<arguments>`: their tokens; else []."""
        head = node.head
        at = following(head, node.after_template() + 1)  # the name
        if at + 1 < len(head) and opens_angle(head, at + 1):
            return [strip(p) for p in split(head[at + 2:match(head, at + 1)], ",")[0]]
        return []

    # -- constants --

    def query(self, tokens, scope):
        """The expression as g++ can be asked for it outside of everything, or None."""
        code, out = code_of(tokens), []
        if not code:
            return None
        for i, token in enumerate(code):
            text, before = token.text, code[i - 1].text if i else ""
            if text in ("=", "++", "--", "{", ";", ".", "->", "?:") or text.endswith("=") and text not in (
                    "==", "!=", "<=", ">="):
                return None
            if token.kind == "id" and before != "::":
                if text == "B" and scope.B:
                    text = "Build"
                elif text in scope.constants:
                    text = scope.constants[text]
                elif text in scope.replaced:
                    text = plain(scope.replaced[text])
                elif text in scope.hidden:
                    return None
                elif text not in self.constant_names | CONSTANT_WORDS and not (
                        text.startswith("__") and code[i + 1:i + 2] and code[i + 1].text in (",", ">")):
                    return None  # a type of the compiler's may stand between < and >
            out.append(text)
        text = ""
        for word in out:
            text += " " + word if text and (word[0].isalnum() or word[0] == "_") and (
                text[-1].isalnum() or text[-1] == "_") else word
        return text.replace("&&", " && ").replace(">>", "> >")

    def value(self, tokens, scope):
        number = literal(tokens)
        if number is not None:
            return {"true": True, "false": False}.get(number, number)
        query = self.query(tokens, scope)
        return None if query is None else self.oracle.ask(query)

    def decided(self, tokens, scope):
        """True or False if Build decides this condition, else None."""
        value = self.value(tokens, scope)
        if value is None:
            return truth(self.expression(tokens, scope))
        return value if isinstance(value, bool) else bool(int(str(value).rstrip("uUlL"), 0))

    # -- expressions --

    def fold(self, tokens, scope):
        """A balanced run of tokens with its ternaries, && and || resolved."""
        parts, separators = split(tokens, (",", ";"))
        out = []
        for i, part in enumerate(parts):
            out += self.segment(part, scope)
            if i < len(separators):
                out.append(separators[i])
        return out

    def segment(self, tokens, scope):
        cut = 0
        for i in top_level(tokens):
            text = tokens[i].text
            if text == "return" or (text.endswith("=") and text not in ("==", "!=", "<=", ">=")):
                cut = i + 1
        return self.inside(tokens[:cut], scope) + self.expression(tokens[cut:], scope)

    def expression(self, tokens, scope):
        start = following(tokens, 0)
        lead, tokens = tokens[:start], tokens[start:]
        if not any(t.text in ("?", "||", "&&") for t in tokens):
            return lead + self.inside(tokens, scope)
        question = next((i for i in top_level(tokens) if tokens[i].text == "?"), None)
        if question is not None:
            depth, colon = 0, None
            for i in top_level(tokens):
                if i > question and tokens[i].text == "?":
                    depth += 1
                elif i > question and tokens[i].text == ":":
                    if depth == 0:
                        colon = i
                        break
                    depth -= 1
            if colon is None:
                raise Refusal(f"extract cannot read this expression: {plain(tokens)}", 1)
            condition, yes, no = tokens[:question], tokens[question + 1:colon], tokens[colon + 1:]
            decision = self.decided(condition, scope)
            if decision is not None:
                return lead + strip(self.expression(strip(yes if decision else no), scope))
            return (lead + self.expression(condition, scope) + [tokens[question]]
                    + self.expression(yes, scope) + [tokens[colon]] + self.expression(no, scope))
        for operator, absorbing in (("||", True), ("&&", False)):
            parts, separators = split(tokens, (operator,))
            if len(parts) > 1 and all(code_of(p) for p in parts):
                return lead + self.junction(parts, separators, absorbing, scope)
        return lead + self.inside(tokens, scope)

    def junction(self, parts, separators, absorbing, scope):
        """a || b (absorbing is True) or a && b (False): true drops out of &&, false decides it."""
        kept = []
        for part in parts:
            decision = self.decided(part, scope)
            if decision is absorbing and all(self.pure(p, scope) for p in kept):
                return [Token("id", "true" if absorbing else "false")]
            if decision is None:
                kept.append(self.expression(part, scope))
            elif decision is absorbing:
                kept.append([Token("ws", " "), Token("id", "true" if absorbing else "false")])
        if not kept:
            return [Token("id", "false" if absorbing else "true")]
        out = strip(kept[0])
        for part in kept[1:]:
            space = [] if part and part[0].kind in TRIVIA else [Token("ws", " ")]
            out = out + ([] if out[-1].kind in TRIVIA else [Token("ws", " ")]) + [separators[0]] + space + part
        if len(kept) == 1:  # (a) alone needs no parentheses
            code = code_of(out)
            if code[0].text == "(" and match(code, 0) == len(code) - 1:
                out = strip(out)[1:-1]
        return out

    def pure(self, tokens, scope):
        """Whether leaving it out changes nothing: no assignments, no calls but of constexpr functions."""
        code = code_of(tokens)
        for i, token in enumerate(code):
            if token.text in ("++", "--") or (
                    token.text.endswith("=") and token.text not in ("==", "!=", "<=", ">=")):
                return False
            if token.text == "(" and i and (code[i - 1].kind == "id" or code[i - 1].text in (">", ")", "]")):
                j = i - 1
                while j > 0 and code[j].text != "<" and code[i - 1].text == ">":
                    j -= 1
                name = code[j - 1] if code[i - 1].text == ">" else code[j]
                if name.text not in self.constant_names | CONSTANT_WORDS | {"min", "max"}:
                    return False
        return True

    def inside(self, tokens, scope):
        """Brackets, std::conditional, aliases and specializations within an expression without ?: && ||."""
        out, i = [], 0
        while i < len(tokens):
            token = tokens[i]
            angle = i + 1 < len(tokens) and tokens[i + 1].text == "<" and opens_angle(tokens, i + 1)
            before = previous(tokens, i)
            if token.kind == "id" and before not in (".", "->", "::") and token.text in scope.replaced:
                out += scope.replaced[token.text]
                i += 1
                continue
            if token.kind == "id" and angle and token.text in ("conditional", "conditional_t"):
                done = self.conditional(tokens, i, out, scope)
                if done:
                    i = done
                    continue
            if token.kind == "id" and angle and token.text in self.specialized:
                done = self.specialization(tokens, i, out, scope)
                if done:
                    i = done
                    continue
            if token.kind == "id" and angle and token.text in self.aliases:
                stop = match(tokens, i + 1)
                parameters, target = self.aliases[token.text]
                arguments = [strip(p) for p in split(tokens[i + 2:stop], ",")[0]]
                given = dict(zip(parameters, arguments))
                for t in target:
                    out += self.fold(given[t.text], scope) if t.text in given else [t]
                i = stop + 1
                continue
            if token.text in PAIRS or opens_angle(tokens, i):
                stop = match(tokens, i)
                content = self.fold(tokens[i + 1:stop], scope)
                number = literal(content)
                single = len(code_of(content)) == 1
                grouped = token.text == "(" and (not before or not (before[-1].isalnum() or before[-1] in "_)>]"))
                if grouped and single and content != tokens[i + 1:stop]:
                    code = [t.text for t in code_of(out)]
                    if number == "0" and code[-1:] == ["+"] and len(code) > 1:
                        while out[-1].kind in TRIVIA or out[-1].text == "+":
                            out.pop()
                    else:
                        out.append(code_of(content)[0])
                else:
                    out += [token] + content + [tokens[stop]]
                i = stop + 1
                continue
            out.append(token)
            i += 1
        return out

    @staticmethod
    def drop_prefix(out):
        """Takes `typename`, `std::` and the like off the end of out."""
        while out and (out[-1].kind == "ws" or out[-1].text in ("::", "std", "typename")):
            if out[-1].kind == "ws" and not (len(out) > 1 and out[-2].text in ("::", "std", "typename")):
                break
            out.pop()

    def conditional(self, tokens, i, out, scope):
        stop = match(tokens, i + 1)
        arguments = split(tokens[i + 2:stop], ",")[0]
        decision = self.decided(arguments[0], scope)
        if decision is None or len(arguments) != 3:
            return None
        if tokens[i].text == "conditional":
            if [t.text for t in tokens[stop + 1:stop + 3]] != ["::", "type"]:
                return None
            stop += 2
        chosen = strip(self.fold(strip(arguments[1 if decision else 2]), scope))
        self.drop_prefix(out)
        suffix = []
        while chosen[-1].text == "]":  # T[n] name becomes T name[n]
            open_ = max(k for k in top_level(chosen) if chosen[k].text == "[")
            suffix = chosen[open_:] + suffix
            chosen = strip(chosen[:open_])
        out += chosen
        if suffix:
            name = following(tokens, stop + 1)
            if name >= len(tokens) or tokens[name].kind != "id":
                raise Refusal(f"extract cannot write this array type out: {plain(tokens)}", 1)
            out += tokens[stop + 1:name + 1] + suffix
            stop = name
        return stop + 1

    def specialization(self, tokens, i, out, scope):
        """X<...>::member, where the specialization of X is known: the member's definition."""
        stop = match(tokens, i + 1)
        if [t.text for t in tokens[stop + 1:stop + 2]] != ["::"]:
            return None
        member = tokens[stop + 2].text
        given = [strip(p) for p in split(tokens[i + 2:stop], ",")[0]]
        chosen = None
        for version in self.specialized[tokens[i].text]:
            wanted = self.arguments(version)
            parameters = [name for _, name in version.template()]
            if not wanted:
                chosen = chosen or version
                continue
            fits = True
            for a, w in zip(given, wanted):
                if len(w) == 1 and w[0].text in parameters:
                    continue
                left, right = self.query(a, scope), self.query(w, Scope())
                if w and literal(w):
                    right = plain(w)
                if left is None or right is None:
                    return None
                equal = self.oracle.ask(f"({left}) == ({right})")
                if equal is None:
                    return None
                fits = fits and equal
            if fits:
                chosen = version
        for node in chosen.body or []:
            code = code_of(node.head)
            at = next((k for k, t in enumerate(node.head) if t.text == "="), None)
            if at is None or declared_names(node) != [member]:
                continue
            if code[0].text == "using" or "constexpr" in [t.text for t in code]:
                target = strip(node.head[at + 1:])[:-1]
                self.drop_prefix(out)
                out += [Token("id", "B" if scope.B else "Build") if t.text == "B" else t for t in target]
                return stop + 3
        return None

    # -- statements --

    def block(self, nodes, scope):
        """The statements of a block."""
        out = []
        for node in nodes:
            new = self.statement(node, scope)
            for statement in new:
                others = [n for n in nodes if n is not node]
                if statement.kind == "block" and statement.hoist and not self.clashes(statement, others):
                    out += self.opened(statement)
                else:
                    out.append(statement)
            if out and out[-1].kind == "simple" and out[-1].head[0].text in ("return", "continue", "break") and (
                    not any(code_texts(n.head)[:1] in (["case"], ["default"]) for n in nodes)):
                break
        return out

    @staticmethod
    def opened(block):
        body = [n.copy() for n in block.body]
        if body:
            comments = any(t.kind == "com" for t in block.lead)
            body[0].lead = (block.lead + [t for t in body[0].lead] if comments and any(
                t.kind == "com" for t in body[0].lead) else
                block.lead if comments else first_line(block.lead, body[0].lead))
        return body

    @staticmethod
    def clashes(block, others):
        made = {name for n in block.body if n.kind == "simple" for name, _ in declarators(n.head)}
        named = {t.text for n in others for t in n.tokens() if t.kind == "id"}
        return bool(made & named)

    def statement(self, node, scope):
        """What becomes of a statement: none, one, or a block that may be opened."""
        node = node.copy()
        if node.kind == "verbatim":
            return [node]
        if node.kind == "simple":
            return self.simple(node, scope)
        if node.kind == "block":
            node.body, node.hoist = self.block(node.body, Scope(scope)), False
            return [node]
        if node.kind == "loop":
            if code_texts(node.head) != ["do"]:
                node.head = self.condition_head(node.head, Scope(scope))
            node.then = self.single(node.then, scope)
            return [node]
        open_ = next(i for i, t in enumerate(node.head) if t.text == "(")
        condition = node.head[open_ + 1:-1]
        decision = self.decided(condition, scope)
        if decision is not None:
            chosen = node.then if decision else node.other
            self.chose_first = self.chose_first or decision
            if chosen is None:
                return []
            chosen = chosen.copy()
            comments = [t for t in chosen.lead if t.kind == "com"]
            chosen.lead = node.lead if not comments else node.lead[:-1] + chosen.lead
            chosen.trail = chosen.trail or node.trail
            result = self.statement(chosen, scope)
            for statement in result:
                if statement.kind == "block":
                    statement.hoist = True
            return result
        node.head = node.head[:open_ + 1] + strip(self.expression(condition, scope)) + node.head[-1:]
        node.then = self.single(node.then, scope)
        if node.other:
            new = self.statement(node.other, Scope(scope))
            if not new or (new[0].kind == "block" and not new[0].body):
                node.other, node.between = None, []
            else:
                node.other = new[0]
                node.other.lead = [Token("ws", " ")]
        if not node.other and node.then.kind == "block" and not node.then.body and self.pure(condition, scope):
            return []
        return [node]

    def single(self, node, scope):
        """The statement under an if or a loop."""
        new = self.statement(node, Scope(scope))
        if len(new) == 1:
            new[0].lead = node.lead
            return new[0]
        block = Node("block", node.lead, [Token("op", "{")])
        block.body, block.tail = new, [Token("op", "}")]
        return block

    def condition_head(self, head, scope):
        open_ = next(i for i, t in enumerate(head) if t.text == "(")
        return head[:open_ + 1] + self.fold(head[open_ + 1:-1], scope) + head[-1:]

    def simple(self, node, scope):
        code = [t.text for t in code_of(node.head)]
        called = re.match(r"^(\w+)(<.*>)?\((.*)\);$", plain(node.head))
        if called and called.group(1) in self.empty and "(" not in called.group(3):
            return []
        if code[0] == "static_assert" and self.decided(split(node.head[2:-2], ",")[0][0], scope):
            return []
        if called and called.group(1) in self.wrappers and called.group(2) and not called.group(3):
            inlined = self.inlined(node, called.group(1), scope)
            if inlined is not None:
                return inlined
        before = declarators(node.head)
        node.head = self.fold(node.head, scope)
        for name, init in before:
            if name in scope.replaced or name in scope.constants or name in self.constant_names:
                scope.hide(name)
            if "constexpr" in code and init is not None:
                query = self.query(init, scope)
                if query is not None:
                    scope.constants[name] = f"({query})"
        after = declarators(node.head)
        if len(after) == 1 and "const" in code and literal(after[0][1] or []) and (
                "bool" in code or not literal(before[0][1])):
            scope.replaced[after[0][0]] = [code_of(after[0][1])[0]]
            return []
        return [node]

    def inlined(self, node, name, scope):
        """What the call name<...>() stands for, if that is one statement or none; else None."""
        open_ = next(i for i, t in enumerate(node.head) if opens_angle(node.head, i))
        given = [strip(p) for p in split(node.head[open_ + 1:match(node.head, open_)], ",")[0]]
        wrapper, inner, remark = self.wrappers[name], Scope(), ""
        if len(given) != len(wrapper.template()):
            return None
        for argument, (_, parameter) in zip(given, wrapper.template()):
            if parameter == "B":
                inner.B = True
                continue
            query = self.query(argument, scope)
            if query is None:
                return None
            inner.constants[parameter] = f"({query})" if len(argument) > 3 else query
            inner.replaced[parameter] = self.fold(argument, scope)
            remark = self.remarks.get(plain(argument), remark)
        self.chose_first = False
        body = self.block(wrapper.body, inner)
        if len(body) > 1 or body and (body[0].kind != "simple" or declarators(body[0].head) or any(
                t.kind == "com" for t in body[0].lead)):
            return None
        if not body:
            return []
        if any(t.text == "asm" for t in body[0].head):
            return None  # an instruction keeps its name
        node.head = [Token("id", "Build") if t.text == "B" else t for t in body[0].head]
        if remark and self.chose_first and not node.trail:
            node.trail = tokenize(f"  // {remark}")
            if not any(t.kind == "nl" for t in node.lead):
                node.lead = [Token("nl", "\n")]
        return [node]

    # -- declarations --

    def scope_nodes(self, nodes, scope):
        out = []
        for node in nodes:
            new = self.declaration(node, scope)
            if new is not None:
                out.append(new)
        return out

    def declaration(self, node, outer):
        if node.kind in ("comment", "pp", "define", "enum"):
            return node
        if node.kind == "macro":
            return None
        node = node.copy()
        if node.kind == "namespace":
            node.body = self.scope_nodes(node.body, outer)
            return node
        scope = Scope(outer)
        scope.parameters(node)
        if node.kind == "struct":
            names = declared_names(node)
            others = [n for _, n in node.template() or [] if n != "B"]
            for member in node.body:
                for name in declared_names(member):
                    scope.hide(name)
                    if "static" in [t.text for t in member.head] and names and not others and (
                            member.kind == "simple") and not outer.hidden:
                        scope.constants[name] = f"{names[0]}{'<Build>' if scope.B else ''}::{name}"
            node.head = self.function_head(node.head, scope)
            node.body = self.scope_nodes(node.body, scope)
            return node
        if node.kind == "function":
            for i in top_level(node.head):
                if node.head[i].text == "(":
                    for part in split(node.head[i + 1:match(node.head, i)], ",")[0]:
                        ids = [t.text for t in code_of(split(part, "=")[0][0]) if t.kind == "id"]
                        if len(ids) > 1:
                            scope.hide(ids[-1])
            start = node.after_template()
            node.head = node.head[:start] + self.function_head(node.head[start:], scope)
            had_body = bool(node.body)
            node.body = self.block(node.body, scope)
            if had_body and not node.body and "void" in [t.text for t in node.head]:
                self.empty.update(declared_names(node))
            if self.has_undecided(node, scope):
                self.undecided = function_name(node)
            return node
        start = node.after_template()
        code = [t.text for t in code_of(node.head[start:])]
        changed = node.head[:start] + self.fold(node.head[start:], scope)
        if code[:1] == ["using"] and node.template() is not None and plain(changed) != plain(node.head):
            at = next(i for i, t in enumerate(changed) if i >= start and t.text == "=")
            target = strip(changed[at + 1:])[:-1]
            if target[0].text in self.types:
                self.aliases[code[1]] = ([name for _, name in node.template()], target)
                return None
        node.head = changed
        # A template of a constant: `template <class B> constexpr bool x = ...` that is now a literal.
        made = declarators(node.head[start:])
        if len(made) == 1 and made[0][1] and "constexpr" in code and "bool" in code and not scope.hidden:
            value = self.decided(made[0][1], scope)
            if value is not None:
                at = next(i for i, t in enumerate(node.head) if i >= start and t.text == "=")
                node.head = node.head[:at + 1] + tokenize(" true;" if value else " false;")
        return node

    def function_head(self, head, scope):
        """Its launch bounds, parameters and member initializers."""
        return self.inside(head[:-1], scope) + head[-1:] if head[-1].text == "{" else self.inside(head, scope)

    @staticmethod
    def has_undecided(node, scope):
        """Whether an `if constexpr` is left that nothing but B could decide."""
        return not scope.dependent and any(
            [t.text for t in code_of(n.head)][:2] == ["if", "constexpr"] for n in walk(node.body))


def enumerator_comments(node):
    """{Enum::name: 'enum: the comment behind it'}"""
    name, found = declared_names(node)[0], {}
    for line in text_of(node.head).split("\n"):
        entry = re.match(r"\s*(\w+)(?: = [^,]*)?,?\s*// (.*)", line)
        if entry:
            found[f"{name}::{entry.group(1)}"] = f"{name.lower()}: {entry.group(2)}"
    return found


def first_line(outer, inner):
    """The lead of a statement that leaves a block: where the block stood, with its own comments."""
    if any(t.kind in ("com", "pp") for t in inner):
        newlines = [t for t in outer if t.kind == "nl"]
        rest = list(inner)
        while rest and rest[0].kind in ("nl", "ws"):
            rest.pop(0)
        return newlines + rest
    return outer


def walk(nodes):
    for node in nodes:
        yield node
        yield from walk(node.children())


def walk_scopes(nodes):
    """The declarations of all namespaces."""
    for node in nodes:
        yield node
        if node.kind == "namespace":
            yield from walk_scopes(node.body)


# ---- what is still named ----


def drop_unused_locals(node):
    """Variables of a function that only the dropped branches named."""
    changed = True
    while changed:
        changed = False
        uses = {}
        for token in node.head + [t for n in node.body for t in n.tokens()]:
            words = [token.text] if token.kind == "id" else []
            for word in re.findall(r"\w+", token.text) if token.kind == "pp" else words:
                uses[word] = uses.get(word, 0) + 1

        def pruned(nodes):
            nonlocal changed
            out = []
            for n in nodes:
                if n.kind == "simple":
                    kept = without_unused(n, uses)
                    changed = changed or kept is not n
                    if kept is None:
                        continue
                    n = kept
                elif n.kind in ("block", "if", "loop"):
                    n = n.copy()
                    if n.body is not None:
                        n.body = pruned(n.body)
                    for part in ("then", "other"):
                        inner = getattr(n, part)
                        if inner is not None and inner.kind != "simple":
                            setattr(n, part, pruned([inner])[0])
                out.append(n)
            return out

        node.body = pruned(node.body)


def without_unused(node, uses):
    """The declaration, or None if its names stand nowhere else."""
    code = code_of(node.head)
    if code[0].text == "using" and len(code) > 2 and code[2].text == "=" and uses.get(code[1].text) == 1:
        return None
    made = declarators(node.head)
    harmless = [i for i, (name, init) in enumerate(made) if uses.get(name) == 1 and (
        code[0].text == "constexpr" or not any(t.text in ("(", "{", "++", "--", "=") for t in init or []))]
    if harmless and len(harmless) == len(made) and code[0].text not in ("return", "delete", "throw"):
        return None
    return node


class Unit:
    """A declaration that is kept or dropped as a whole."""

    def __init__(self, node, names, parent, is_root):
        self.node, self.names, self.parent = node, names, parent
        self.live = self.is_root = is_root
        self.ids = set()


def is_member_kept(node):
    """Members that go with their struct: data, constructors, operators."""
    names = declared_names(node)
    if node.kind in ("comment", "pp"):
        return True
    code = [t.text for t in code_of(node.head)]
    if node.kind == "function" or node.kind == "struct" and names:
        return "operator" in names or any(n.startswith("~") for n in names)
    return not ("using" in code[:2] or "using" in code or "constexpr" in code)


def identifiers(tokens):
    found, code = set(), code_of(tokens)
    for token in tokens:
        if token.kind == "pp":  # X## stands for every name that begins with X
            found |= set(re.findall(r"[A-Za-z_]\w*(?:##)?", token.text))
    for i, token in enumerate(code):
        if token.kind == "id":
            found.add(token.text)
            if i > 1 and code[i - 1].text == "::" and code[i - 2].text in ("B", "Build"):
                found.add("Build::" + token.text)
    return found


def live_units(nodes):
    """The units, the live ones marked."""
    units = []

    def add(node, parent, is_root, struct_name):
        names = declared_names(node)
        if struct_name == "Build":
            names = ["Build::" + n for n in names]
        unit = Unit(node, names, parent, is_root)
        units.append(unit)
        own = [node.head]
        if node.kind == "struct":
            for member in node.body:
                if is_member_kept(member) or declared_names(member) == declared_names(node):
                    if member.kind == "struct":  # an anonymous union
                        for inner in member.body:
                            own.append(inner.tokens())
                    own.append(member.tokens())
                else:
                    add(member, unit, False, names[0] if names else "")
            own.append(node.tail)
        elif node.body is not None:
            own += [n.tokens() for n in node.body]
        for tokens in own:
            unit.ids |= identifiers(tokens)

    def scope(inner, is_public):
        for node in inner:
            if node.kind == "namespace":
                named = [t for t in code_of(node.head) if t.kind == "id" and t.text != "namespace"]
                scope(node.body, is_public and bool(named))
            elif node.kind not in ("comment", "pp"):
                add(node, None, is_public and node.kind != "define", "")

    scope(nodes, True)
    for unit in units:
        pasted = tuple(i[:-2] for i in unit.ids if i.endswith("##"))
        unit.ids |= {n for u in units if u.node.kind == "define" for n in u.names if pasted and n.startswith(pasted)}
    spread(units)
    hidden = shadowed(units)
    if hidden:
        for unit in units:
            unit.live = unit.is_root
        spread([u for u in units if u not in hidden])
    return units


def spread(units):
    """Marks as live what live units name."""
    named, changed = set(), True
    for unit in units:
        if unit.live:
            named |= unit.ids
    while changed:
        changed = False
        for unit in units:
            if unit.live or (unit.parent and not unit.parent.live):
                continue
            if any(n in named for n in unit.names) or (unit.parent and not unit.names):
                unit.live = changed = True
                named |= unit.ids


def shadowed(units):
    """Member functions of structs that are nothing but bases, where the derived struct has its own."""
    structs = {u.names[0]: u for u in units if u.node.kind == "struct" and u.parent is None and u.live and u.names}
    bases = {}
    for name, unit in structs.items():
        code = code_texts(unit.node.head[unit.node.after_template():])
        if ":" in code:
            bases[name] = next((t for t in code[code.index(":") + 1:] if t in structs), None)
    alive = [u for u in units if u.live and u.parent is None]
    found = []
    for name, base in bases.items():
        only_base = base is not None
        for unit in alive:
            tokens = unit.node.tokens()
            for i, token in enumerate(tokens):
                if token.text != base or previous(tokens, i) in ("struct", ":"):
                    continue
                after = i + 1
                if after < len(tokens) and opens_angle(tokens, after):
                    after = match(tokens, after) + 1
                only_base = only_base and tokens[after].text == "::"
        if only_base:
            own = {n for m in structs[name].node.body if m.kind == "function" for n in declared_names(m)}
            found += [u for u in units if u.parent is structs[base] and u.node.kind == "function"
                      and set(u.names) <= own]
    return found


def prune(nodes, dead, uses, is_public):
    """Without dead units, banners of nothing, and enumerators that nobody names."""
    out, dropped = [], []
    for node in nodes:
        if id(node) in dead:
            out.append(None)
            dropped.append(node)
            continue
        node = node.copy()
        if dropped:
            node.lead = lead_after(dropped, node)
            dropped = []
        if node.kind == "namespace":
            inner = [t for t in code_of(node.head) if t.kind == "id" and t.text != "namespace"]
            node.body = prune(node.body, dead, uses, is_public and bool(inner))
            if not [n for n in node.body if n.kind not in ("comment", "pp")]:
                out.append(None)
                continue
        elif node.kind == "struct":
            node.body = prune(node.body, dead, uses, is_public)
            node.body = [without_placeholder(n, uses) for n in node.body]
        elif node.kind == "enum" and not is_public:
            node.head = used_enumerators(node, uses)
        out.append(node)
    return with_comments(out)


def lead_after(dropped, node):
    """The lead of a node whose predecessors are gone: with their blank line, and, if it stood in one
    paragraph with them, with the comment above the paragraph."""
    lead = node.lead
    if text_of(lead[:next((i for i, t in enumerate(lead) if t.kind == "com"), len(lead))]).count("\n") != 1:
        return lead
    has_comment = any(t.kind in ("com", "pp") for t in lead)
    for before in reversed(dropped):
        text = text_of(before.lead)
        if "//" in text and not has_comment and before.kind == node.kind and node.kind in ("function", "simple"):
            return before.lead
        if "\n\n" in text:
            return [Token("nl", "\n")] + lead
    return lead


def without_placeholder(node, uses):
    """A union, without the char that stands for what this build does not have. It stays a union even of one
    member: nvcc may add up addresses in another order otherwise."""
    if node.kind == "struct" and code_texts(node.head) == ["union", "{"]:
        node.body = [n for n in node.body if code_texts(n.head)[:1] != ["char"]
                     or any(uses[x] > 1 for x in declared_names(n))]
    return node


def used_enumerators(node, uses):
    """The head of an enum without the enumerators that stand nowhere else."""
    head = node.head
    open_ = next(i for i, t in enumerate(head) if t.text == "{")
    close = match(head, open_)
    inside = head[open_ + 1:close]
    parts, _ = split(inside, (",",))
    if "cast to " + declared_names(node)[0] in uses or any(t.text == "=" for t in inside):
        return head  # their numbers matter
    out, drop_comment = [], False
    for part in parts:
        code = code_of(part)
        # A comment behind the comma belongs to the enumerator before it.
        cut = next((i for i, t in enumerate(part) if t.kind == "nl"), 0)
        if not drop_comment:
            out += part[:cut]
        if not code:
            out += part[cut:]
            continue
        drop_comment = uses[code[0].text] == 1
        if not drop_comment:
            out += part[cut:] + [Token("op", ",")]
    return head[:open_ + 1] + out + head[close:]


def banner_level(node):
    if node.kind != "comment":
        return None
    text = text_of(node.lead).strip()
    return 1 if text.startswith("// ====") else 2 if text.startswith("// ----") else None


def with_comments(nodes):
    """Drops the None, and the comments that stood with them."""
    out = []
    for i, node in enumerate(nodes):
        if node is None:
            continue
        level = banner_level(node)
        if level:
            for other in nodes[i + 1:]:
                other_level = other and banner_level(other)
                if other_level and other_level <= level:
                    break
                if other is not None and other.kind not in ("comment", "pp"):
                    out.append(node)
                    break
            continue
        if node.kind == "comment" and i and nodes[i - 1] is None:
            nodes[i] = None
            continue
        if node.kind == "comment" and i and nodes[i - 1].kind == "comment" and (
                not out or out[-1] is not nodes[i - 1]):
            continue
        out.append(node)
    return out


# ---- without B ----


class Untemplater:
    """Turns the template parameter B into Build."""

    def __init__(self, nodes):
        self.places = {}
        for node in walk(nodes):
            if node.kind in ("comment", "pp", "define"):
                continue
            for place, (_, name) in enumerate(node.template() or []):
                if name == "B":
                    for declared in declared_names(node):
                        self.places.setdefault(declared, set()).add(place)

    def nodes(self, nodes, has_b, parameters):
        return [self.node(n, has_b, parameters) for n in nodes]

    def node(self, node, has_b, parameters):
        if node.kind in ("comment", "pp", "define"):
            return node
        node = node.copy()
        header = node.template() if node.kind not in ("if", "loop", "block") else None
        if header is not None:
            has_b = has_b or any(n == "B" for _, n in header)
            parameters = parameters | {n for _, n in header if n != "B"}
            node.head = self.header(node, header)
        node.head = self.tokens(node.head, has_b, parameters)
        node.tail = self.tokens(node.tail, has_b, parameters)
        if node.body is not None:
            node.body = self.nodes(node.body, has_b, parameters)
        for part in ("then", "other"):
            if getattr(node, part):
                setattr(node, part, self.node(getattr(node, part), has_b, parameters))
        return node

    @staticmethod
    def header(node, parameters):
        if not any(name == "B" for _, name in parameters):
            return node.head
        rest = [strip(tokens) for tokens, name in parameters if name != "B"]
        start = node.after_template()
        if not rest and not Folder.arguments(node):
            return node.head[start:]
        joined = []
        for tokens in rest:
            joined += ([Token("op", ","), Token("ws", " ")] if joined else []) + tokens
        angle = node.angle()
        return node.head[:angle + 1] + joined + node.head[match(node.head, angle):]

    def tokens(self, tokens, has_b, parameters):
        out, i = [], 0
        while i < len(tokens):
            token, before = tokens[i], previous(tokens, i)
            if token.text == "typename" and token.kind == "id":
                stop, qualified = self.qualified(tokens, i + 1)
                name = tokens[i + 1:stop]
                if qualified and not (parameters and (
                        parameters & identifiers(name) or "<" in code_texts(name))):
                    i = following(tokens, i + 1)
                    continue
            if token.text == "template" and before in (".", "->"):
                name = following(tokens, i + 1)
                stop = match(tokens, name + 1)
                if not parameters or not self.arguments(tokens, name, stop, has_b):
                    i = name
                    continue
            if token.kind == "id" and i + 1 < len(tokens) and opens_angle(tokens, i + 1) and (
                    token.text in self.places):
                stop = match(tokens, i + 1)
                kept = self.arguments(tokens, i, stop, has_b)
                out.append(token)
                if kept:
                    out.append(tokens[i + 1])
                    for k, argument in enumerate(kept):
                        out += ([Token("op", ","), Token("ws", " ")] if k else [])
                        out += self.tokens(argument, has_b, parameters)
                    out.append(tokens[stop])
                i = stop + 1
                continue
            if token.kind == "id" and token.text == "B" and has_b and before not in (".", "->"):
                token = Token("id", "Build", token.column)
            out.append(token)
            i += 1
        return out

    def arguments(self, tokens, name, stop, has_b):
        places = self.places.get(tokens[name].text, ())
        kept = []
        for place, argument in enumerate(split(tokens[name + 2:stop], ",")[0]):
            text = plain(argument)
            if not (place in places and (text == "Build" or text == "B" and has_b)):
                kept.append(strip(argument))
        return kept

    @staticmethod
    def qualified(tokens, i):
        """The end of the name a::b<c>::d at i, and whether it has a ::."""
        i, found = following(tokens, i), False
        while i < len(tokens):
            if tokens[i].text == "::":
                found = True
            elif opens_angle(tokens, i):
                i = match(tokens, i)
            elif tokens[i].kind != "id":
                break
            i += 1
        return i, found


# ---- struct Build ----


def literal_build(build, oracle, knobs, enums):
    """The members of Build as nodes with their values, and what each is called or comes from."""
    out = []
    for node in build.body:
        code = [t.text for t in code_of(node.head)]
        if node.kind == "comment":
            continue
        if node.kind != "simple" or code[:2] != ["static", "constexpr"]:
            raise Refusal(f"extract knows only static constexpr members of Build, not: {plain(node.head)}", 1)
        kind = code[2]
        for name, init in declarators(node.head):
            value = oracle.ask(f"Build::{name}")
            if kind in enums:
                value = next((f"{kind}::{e}" for e in enums[kind]
                              if oracle.ask(f"(Build::{name}) == ({kind}::{e})")), None)
            elif kind == "bool" and value is not None:
                value = "true" if value else "false"
            if value is None:
                value = "?"  # known after the next answer, or refused when it is written
            init = init or []
            used = [w[:-len("_text")] for w in (t.text for t in code_of(init)) if w.endswith("_text")]
            meaning = [knobs[w] for w in used if w in knobs]
            comment = text_of([t for t in node.trail if t.kind == "com"]).lstrip("/ ")
            if not comment and len(used) == 1 and len(code_of(init)) <= 4:
                comment = meaning[0] if meaning else ""
            formula = plain(init) if not used else ""
            member = Node("simple", [Token("nl", "\n"), Token("ws", "  ")],
                          tokenize(f"static constexpr {kind} {name} = {value};"))
            member.comment, member.formula = comment, formula
            out.append(member)
    return out


def finish_build(members):
    """Comments, and blank room, for the members that are left."""
    names = {declared_names(m)[0] for m in members}
    for member in members:
        formula = member.formula
        words = set(re.findall(r"[A-Za-z_]\w*", formula))
        comment = member.comment or (formula if words and words <= names else "")
        if "?" in code_texts(member.head):
            raise Refusal(f"extract does not know the value of Build::{declared_names(member)[0]}", 1)
        if len(plain(member.head)) + len(comment) > 86:  # what a value costs matters to who chooses it
            comment = re.split("[:;]", comment)[0]
        if comment:
            member.trail = tokenize(f"  // {comment}")
    return members


def code_texts(tokens):
    return [t.text for t in code_of(tokens)]


# ---- writing ----


class Writer:
    """Text with the indentation that the nodes have now."""

    def __init__(self):
        self.text = ""
        self.behind = (-1, -1)  # where a comment behind code stood, and stands now

    def column(self):
        return len(self.text) - self.text.rfind("\n") - 1

    def lead(self, tokens, depth, is_first):
        """Line ends (at most one blank line), comments and directives at this depth."""
        newlines, spaces = 0, ""
        for token in tokens:
            if token.kind == "nl":
                newlines += 1
            elif token.kind == "ws":
                spaces = token.text
            else:
                self.newline(newlines, depth if token.kind == "com" else 0, is_first)
                if not newlines:
                    self.text += spaces
                elif newlines == 1 and token.kind == "com" and token.column == self.behind[0]:
                    self.text += " " * (self.behind[1] - self.column())
                else:
                    self.behind = (-1, -1)
                self.text += token.text
                newlines, spaces, is_first = 0, "", False
        self.newline(newlines, depth, is_first)
        if not newlines and tokens and tokens[-1].kind == "ws":
            self.text += tokens[-1].text

    def newline(self, count, depth, is_first):
        if not count:
            return
        self.text = self.text.rstrip(" ") + "\n" * min(count, 1 if is_first else 2) + "  " * depth

    def code(self, tokens):
        """Tokens with the continuation lines as they were: under their bracket, or as far from the start."""
        if not tokens:
            return
        first = next((t for t in tokens if t.column >= 0), None)
        shift = self.column() - (first.column if first else 0)
        brackets, after_newline = [], False
        for token in tokens:
            if token.kind == "nl":
                self.text = self.text.rstrip(" ") + "\n"
                after_newline = True
                continue
            if after_newline and token.kind == "ws":
                continue
            if after_newline and token.kind != "pp":
                column = token.column + shift
                if brackets and brackets[-1][0] + 1 == token.column:
                    column = brackets[-1][1] + 1
                self.text += " " * max(column, 0)
            after_newline = False
            if token.text in PAIRS or token.text == "<":
                brackets.append((token.column, self.column()))
            elif token.text in (")", "]", "}", ">") and brackets:
                brackets.pop()
            self.text += token.text

    def nodes(self, nodes, depth, at_start=True):
        for i, node in enumerate(nodes):
            self.node(node, depth, at_start and i == 0)

    def node(self, node, depth, is_first=False):
        self.lead(node.lead, depth, is_first)
        if node.kind in ("pp", "define", "verbatim"):
            self.text += text_of(node.head + node.trail)
            return
        self.code(node.head)
        self.text += text_of(node.note)
        if node.then:
            for part in (node.then, node.other):
                if part is None:
                    continue
                if part is node.other:
                    self.text += (" else" if self.text.endswith("}") else "\n" + "  " * depth + "else")
                self.node(part, depth + (part.kind != "block"), False)
            self.code(node.tail)
        if node.body is not None:
            inner = depth + (node.kind != "namespace")
            if node.body:
                self.nodes(node.body, inner, node.kind != "namespace")
                self.close(node, inner, depth)
            elif any(t.kind == "com" for t in node.close):
                self.close(node, inner, depth)
            else:
                self.text = self.text.rstrip(" ") if not node.note else self.text + "\n" + "  " * depth
            self.code(node.tail)
        self.behind = (-1, -1)
        for token in node.trail:
            if token.kind == "com":
                self.behind = (token.column, self.column())
            self.text += token.text

    def close(self, node, inner, depth):
        tokens = node.close
        while tokens and tokens[-1].kind in ("nl", "ws"):
            tokens = tokens[:-1]
        if tokens:
            self.lead(tokens, inner, False)
        last = node.body[-1] if node.body else None
        inline = not any(t.kind == "nl" for t in node.close)
        if inline and last and not any(t.kind == "nl" for n in node.body for t in n.tokens()):
            self.text += " "
            return
        blank = node.kind == "namespace" and text_of(node.close).count("\n") > 1
        self.text = self.text.rstrip() + ("\n\n" if blank else "\n") + "  " * depth


HEADERS = {  # what a file names when it needs the header; headers that are not here stay
    "cuda.h": r"\bCU(_|[a-z])|\bcu(Tensor|uint)",
    "cmath": r"std::(isinf|isnan|sqrt|fabs|exp2|log2)|INFINITY|NAN\b|fmaf?\b|log2f",
    "cstdint": r"\bu?int(8|16|32|64|ptr)_t\b",
    "cstdio": r"\bs?n?printf\b",
    "cstring": r"\bmem(cpy|set)\b",
    "type_traits": r"std::(is_\w+|conditional\w*|enable_if\w*|remove_\w+|integral_constant)",
    "cuda_bf16.h": r"__nv_bfloat16",
    "cuda_fp16.h": r"__half",
    "cuda_fp8.h": r"__nv_fp8",
    "mma.h": r"nvcuda::wmma",
}


def without_format_marks(nodes):
    for node in [n for n in walk(nodes) if n.kind != "define"]:
        for part in ("lead", "close"):
            tokens = getattr(node, part)
            while True:
                at = next((i for i, t in enumerate(tokens) if t.text.startswith("// clang-format")), None)
                if at is None:
                    break
                stop = at + 1
                while stop < len(tokens) and tokens[stop].kind == "ws":
                    stop += 1
                stop += stop < len(tokens) and tokens[stop].kind == "nl"
                tokens = tokens[:at] + tokens[stop:]
            setattr(node, part, tokens)


def manual_words(source):
    """The paragraphs of the manual that say what letters and suffixes mean."""
    lines, on = [], False
    for line in source[:source.index(BEGIN)].split("\n"):
        if re.match(r"// (Letters|Suffixes)\s", line):
            on = True
        elif not line.startswith("//  "):
            on = False
        if on:
            lines.append(line)
    return lines


def extract(source, line, knobs, compiler):
    """The text of the file."""
    tokens, macros = resolve_directives(tokenize(copy_region(source)), knobs,
                                        dict(knob.split("=") for knob in line.knobs))
    parser = Parser(tokens, macros)
    parsed, _ = parser.nodes(False, len(tokens))
    without_format_marks(parsed)
    for node in walk(parsed):
        if node.kind not in ("define", "macro", "verbatim"):
            used = [t.text for t in node.head if t.kind == "id" and t.text in macros]
            if used:
                raise Refusal(f"extract cannot expand the macro {used[0]} in: {plain(node.head)}", 1)
    build = next((n for n in walk_scopes(parsed)
                  if n.kind == "struct" and declared_names(n) == ["Build"]), None)
    if build is None:
        raise Refusal("sdpa.cu has no struct Build in its copy region", 1)
    enums = {}
    for node in walk_scopes(parsed):
        if node.kind == "enum":
            inside = node.head[next(i for i, t in enumerate(node.head) if t.text == "{") + 1:]
            inside = inside[:max(i for i, t in enumerate(inside) if t.text == "}")]
            enums[declared_names(node)[0]] = [code_of(p)[0].text for p in split(inside, ",")[0] if code_of(p)]

    definitions = [n.head[0].text for n in walk(parsed) if n.kind == "define" and "undef" not in n.head[0].text]
    oracle = Oracle(line.knobs, compiler)
    nodes = settled(parsed, oracle)
    members = literal_build(build, oracle, knobs, enums)
    oracle.answer()
    members = literal_build(build, oracle, knobs, enums)
    for node in walk_scopes(nodes):
        if node.kind == "struct" and declared_names(node) == ["Build"]:
            node.body = members
        if node.kind == "namespace" and any(is_section(n) for n in node.body):
            node.body = retitled(node.body)
    nodes = tidy(tidy(nodes))  # the first leaves alone what only dead members name
    while bind_parameters(nodes, oracle) or expand_macros(nodes, definitions, parser.macros, oracle):
        nodes = tidy(settled(nodes, oracle))
    for node in walk_scopes(nodes):
        if node.kind == "struct" and declared_names(node) == ["Build"]:
            finish_build(node.body)
    nodes = Untemplater(nodes).nodes(nodes, False, set())
    writer = Writer()
    writer.nodes(nodes, 0)
    return finish(writer.text, source, line, knobs)


def settled(parsed, oracle):
    """The nodes with all that Build decides resolved."""
    while True:
        folder, known = Folder(parsed, oracle), None
        while known != folder.empty:  # calls of what became empty go too
            known, folder.undecided = set(folder.empty), None
            nodes = folder.scope_nodes(parsed, Scope())
        if oracle.answer():
            continue
        if not any([freeze_flags(n) for n in walk(nodes) if n.kind == "function"]):
            break
        parsed = nodes
    if folder.undecided:
        raise Refusal(f"extract cannot decide an `if constexpr` of {folder.undecided}", 1)
    for node in walk(nodes):
        if node.kind == "simple" and re.search(r"\bif constexpr\b", plain(node.head)):
            raise Refusal(f"extract cannot look into this expression: {plain(node.head)[:100]}", 1)
    return nodes


def freeze_flags(function):
    """Makes const the bools whose assignments were in branches that are gone. Whether there were any."""
    body = [t for n in function.body for t in n.tokens()]
    frozen = False
    for node in walk(function.body):
        made = declarators(node.head) if node.kind == "simple" else []
        if len(made) != 1 or code_texts(node.head)[0] != "bool" or truth(made[0][1] or []) is None:
            continue
        code = code_texts(body)
        uses = [i for i, text in enumerate(code) if text == made[0][0]]
        reads = [i for i in uses if code[i - 1] in ("!", "&&", "||") or code[i - 2:i] == ["if", "("]]
        if len(reads) == len(uses) - 1 and not any(code[i + 1] in ("=", ".") for i in reads):
            node.head = [Token("id", "const"), Token("ws", " ")] + node.head
            frozen = True
    return frozen


def tidy(nodes):
    """The nodes without what nobody names."""
    for node in walk(nodes):
        if node.kind == "function":
            drop_unused_locals(node)
    units = live_units(nodes)
    uses = {}  # how often live code has a name
    for unit in units:
        if unit.live and unit.parent is None:
            tokens = unit.node.tokens()
            for i, token in enumerate(tokens):
                if token.kind == "id":
                    uses[token.text] = uses.get(token.text, 0) + 1
                if token.text == "static_cast":
                    uses["cast to " + tokens[i + 2].text] = 1
    return prune(nodes, {id(u.node) for u in units if not u.live}, uses, True)


def is_section(node):
    """Whether it is the namespace in which Build stands."""
    return node.kind == "namespace" and any(
        m.kind == "struct" and declared_names(m) == ["Build"] for m in node.body)


def retitled(nodes):
    """The section of Build under a title without knobs."""
    at = next(i for i, n in enumerate(nodes) if is_section(n))
    first = max((i for i in range(at) if banner_level(nodes[i]) == 1), default=None)
    if first is None:
        return nodes
    title = "// ==== 1 CONSTANTS "
    return nodes[:first] + [Node("comment", tokenize("\n\n" + title + "=" * (100 - len(title))), [])] + nodes[at:]


def expand_macros(nodes, definitions, macros, oracle):
    """Expands the macros in the body of a function, if all that decides a branch of it is the same in every call.
    Whether there was one. The others stay as they are, and keep their macros."""
    for node in walk_scopes(nodes):
        if node.kind != "function" or not node.body or node.body[0].kind != "verbatim":
            continue
        kept = node.body, node.close
        tokens = tokenize(preprocessed(definitions, text_of(node.body[0].head), oracle.compiler))
        node.body, node.close = Parser(tokens, macros).nodes(True, len(tokens))
        if all(value is not None for _, _, value in deciding_parameters(node, nodes, oracle)):
            return True
        node.body, node.close = kept
    return False


def preprocessed(definitions, body, compiler):
    """The body of a function with its macros expanded, strings joined, and in lines that can be read."""
    text = "\n".join(definitions) + "\nextract_begin\n" + body + "\n"
    result = subprocess.run([compiler, "-E", "-P", "-C", "-undef", "-nostdinc", "-std=c++17", "-x", "c++", "-"],
                            input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Refusal(f"{compiler} cannot expand the macros in: {plain(tokenize(body))[:100]}", 1)
    out, column = "", 0
    for token in tokenize(result.stdout.split("extract_begin\n")[1]):
        text = token.text
        if token.kind == "str" and text[0] == '"' and re.search(r'"\s*$', out):
            out, text = out.rstrip()[:-1], text[1:]
        column = len(out) - out.rfind("\n") - 1
        if column > 80 and token.kind == "str" and text[0] != '"' and " " in text:
            cut = (text.find("; ") + 1 or text.index(" ")) + 1
            text = text[:cut] + '"\n      "' + text[cut:]
        elif column > 80 and token.kind == "ws" and out.endswith(","):
            text = "\n      "
        out += text
    return out


def deciding_parameters(node, nodes, oracle):
    """Of the template parameters of a function that decide a branch of it: (place, name, value as text, or None if
    the calls do not agree or cannot be read)."""
    parameters = node.template() or []
    branches = {t.text for n in walk(node.body) if code_texts(n.head)[:2] == ["if", "constexpr"]
                for t in n.head if t.kind == "id"}
    if not any(name in branches and name != "B" for _, name in parameters):
        return []
    everything = [n for n in walk_scopes(nodes) if n.kind not in ("namespace", "comment", "pp", "define")]
    name = function_name(node)
    overloaded = [n for n in everything if name in declared_names(n)] != [node]
    globals_ = Folder(nodes, oracle)
    before = {n for other in everything[:everything.index(node)] for n in declared_names(other)}
    calls = []  # (the node in which it is, the arguments)
    for user in everything:
        tokens = [t for t in user.tokens() if t.kind != "nl"] if user is not node else []
        for i, token in enumerate(tokens):
            if token.text == name and token.kind == "id":
                explicit = i + 1 < len(tokens) and opens_angle(tokens, i + 1)
                calls.append((user, [strip(p) for p in split(tokens[i + 2:match(tokens, i + 1)], ",")[0]]
                              if explicit else []))
    found = []
    for place, (tokens, parameter) in enumerate(parameters):
        if parameter in branches and parameter != "B" and "..." not in code_texts(tokens):
            is_type = code_of(tokens)[0].text in ("class", "typename")
            values = {bound_value(user, arguments[place], is_type, before, globals_, oracle)
                      if place < len(arguments) else None for user, arguments in calls}
            found.append((place, parameter, values.pop() if len(values) == 1 and not overloaded else None))
    return found


def bind_parameters(nodes, oracle):
    """Fills in the template parameters that decide a branch of their function and are the same in every call of
    it. Whether there were any."""
    changed = False
    for node in [n for n in walk_scopes(nodes) if n.kind == "function"]:
        bound = next((p for p in deciding_parameters(node, nodes, oracle) if p[2] is not None), None)
        if bound:
            place, parameter, value = bound
            name = function_name(node)
            fill_in(node, place, parameter, value)
            for user in walk_scopes(nodes):
                if user is not node and user.kind not in ("namespace", "comment", "pp", "define"):
                    drop_argument(user, name, place)
            changed = True
    return changed


def bound_value(user, argument, is_type, before, globals_, oracle):
    """What a template argument is everywhere, as text, or None. before: the names that may stand there."""
    scope = Scope()
    scope.B = any(n == "B" for _, n in user.template() or [])
    text = re.sub(r"\bB::", "Build::", plain(argument))
    names = [t.text for i, t in enumerate(argument) if t.kind == "id" and previous(argument, i) != "::"]
    hidden = {n for _, n in user.template() or []} | {
        n for m in walk(user.body or []) if m.kind == "simple" for n in declared_names(m)}
    if is_type:
        return text if len(names) == 1 and names[0] in before and names[0] not in hidden else None
    for statement in walk(user.body or []):
        if statement.kind == "simple" and code_texts(statement.head)[:1] == ["constexpr"]:
            for name, init in declarators(statement.head):
                query = globals_.query(init or [], scope)
                if query is not None:
                    scope.constants[name] = f"({query})"
    query = globals_.query(argument, scope)
    if query is None:
        return None
    if query not in oracle.values:
        oracle.ask(query)
        oracle.answer()
    value = oracle.ask(query)
    if value is None:
        return None
    named = len(names) == 1 and (names[0] in before - hidden or names[0] == "B")
    return text if named and len(code_of(argument)) in (1, 3) else str(value).lower()


def fill_in(node, place, parameter, value):
    """Writes the value for a template parameter of a function."""
    rest = [strip(tokens) for k, (tokens, _) in enumerate(node.template()) if k != place]
    angle, start = node.angle(), node.after_template()
    joined = []
    for tokens in rest:
        joined += ([Token("op", ","), Token("ws", " ")] if joined else []) + tokens
    close = match(node.head, angle)
    header = node.head[:angle + 1] + joined + node.head[close:start] if rest else []

    def filled(tokens):
        out = []
        for i, t in enumerate(tokens):
            is_it = t.text == parameter and t.kind == "id" and previous(tokens, i) not in (".", "->", "::")
            out += tokenize(value) if is_it else [t]
        return out

    node.head = header + filled(node.head[start:])
    for inner in walk(node.body):
        inner.head, inner.tail = filled(inner.head), filled(inner.tail)
    if value[0].isalpha() or len(parameter) == 1:
        node.lead = [Token(t.kind, re.sub(rf"\b{parameter}\b", value, t.text), t.column)
                     if t.kind == "com" else t for t in node.lead]


def drop_argument(user, name, place):
    for node in [user] + list(walk(user.children())):
        for part in ("head", "tail"):
            tokens, i = list(getattr(node, part)), 0
            while i < len(tokens):
                if tokens[i].text == name and i + 1 < len(tokens) and opens_angle(tokens, i + 1):
                    stop = match(tokens, i + 1)
                    arguments = [strip(p) for p in split(tokens[i + 2:stop], ",")[0]]
                    del arguments[place]
                    joined = []
                    for argument in arguments:
                        joined += ([Token("op", ","), Token("ws", " ")] if joined else []) + argument
                    tokens[i + 1:stop + 1] = (tokens[i + 1:i + 2] + joined + tokens[stop:stop + 1]) if joined else []
                i += 1
            setattr(node, part, tokens)


def finish(body, source, line, knobs):
    """Includes, knobs' names in words, and what stands above."""
    for name, pattern in HEADERS.items():
        if not re.search(pattern, re.sub(r"//.*", "", body)):
            body = re.sub(rf"#include <{re.escape(name)}>\n", "", body)
    out = []
    for token in tokenize(body):
        if token.kind in ("com", "str"):
            token.text = re.sub(r"\b[A-Z][A-Z0-9_]+\b",
                                lambda m: m.group().lower() if m.group() in knobs else m.group(), token.text)
        elif token.kind == "id" and (token.text in knobs or token.text.startswith("SDPA_") and not re.search(
                rf"^#define {token.text}\(", body, re.M)):
            raise Refusal(f"extract leaves {token.text} in the code and cannot say what it is", 1)
        out.append(token)
    # Conditionals whose functions nobody names are left empty; what stands above them goes with them.
    body = re.sub(r"^(?://.*\n)*#if.*\n(?:(?:#else.*)?\n)*#endif.*\n", "", text_of(out), flags=re.M)
    body = re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"
    if len(re.findall(r"^ *# *if", body, re.M)) != len(re.findall(r"^ *# *endif", body, re.M)):
        raise Refusal("extract would leave an #if without its #endif", 1)
    license_line = next((t for t in source.split("\n") if t.startswith("// Copyright")), None)
    if license_line is None:
        raise Refusal("sdpa.cu has no licence line '// Copyright ...'", 1)
    words = ["// Scaled dot-product attention, forward: O = softmax(scale * Q @ K.T + mask) @ V.", license_line,
             "//", f"// Made by ./run_all.sh extract {line.name}, which is this line of configs.txt:"]
    current = f"//   {line.name}"
    for knob in line.knobs or ["(every knob at its default)"]:
        if len(current) + len(knob) > 97:
            words.append(current)
            current = "//    "
        current += " " + knob
    arch = f"sm_{line.arch} (no other)" if line.arch else "native (sm_80 or newer)"
    link = " -lcublas" if "#include <cublas_v2.h>" in body else ""
    words += [current, f"// Compile with nvcc -O3 -std=c++17 -arch={arch}{link}, and call sdpa::sdpa_forward().", "//"]
    words += manual_words(source)
    return formatted("\n".join(words) + "\n\n" + body)


def formatted(text):
    """As clang-format leaves it, where there is one."""
    tool = shutil.which("clang-format")
    if not tool:
        return text
    result = subprocess.run([tool, "--style=file", "--assume-filename=" + os.path.join(ROOT, "extract.cu")],
                            input=text, capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else text


# ---- machine code ----


def machine_code(cubin):
    """Of each kernel in an ELF file: its instructions, registers and constants."""
    with open(cubin, "rb") as file:
        data = file.read()
    offset, = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]

    def name(section):
        at = sections[names_at][4] + section[0]
        return data[at:data.index(b"\0", at)].decode()

    found = []
    for section in sections:
        if name(section).startswith(".text."):
            found.append((data[section[4]:section[4] + section[5]], section[7] >> 24))
        elif name(section).startswith((".nv.constant", ".nv.global", ".nv.shared")):
            content = b"" if section[1] == 8 else data[section[4]:section[4] + section[5]]
            found.append((content, section[5]))
    return sorted(found)


def verify(text, line, arch, nvcc):
    with tempfile.TemporaryDirectory() as directory:
        # What the launch depends on is compared as well, as the contents of an array on the device.
        if not (re.search(r"^constexpr size_t shared_bytes = ", text, re.M) and re.search(r" int threads = ", text)):
            raise Refusal(f"the extract of {line.name} does not say what its launch takes: a bug of tools/extract.py", 1)
        launch = ("extern \"C\" __device__ unsigned long long extract_launch[] = {sdpa::shared_bytes%s, "
                  "sdpa::Build::threads};\n")
        whole, alone = os.path.join(directory, "line.cu"), os.path.join(directory, "extract.cu")
        with open(whole, "w", encoding="utf-8") as file:
            file.write(f'#include "{os.path.join(ROOT, "sdpa.cu")}"\n' + launch % "<sdpa::Build>")
        with open(alone, "w", encoding="utf-8") as file:
            file.write(text + launch % "")
        codes = []
        for source, flags in ((whole, ["-DSDPA_NO_MAIN"] + ["-D" + k for k in line.knobs]), (alone, [])):
            cubin = os.path.join(directory, "out.cubin")
            result = subprocess.run([nvcc, "-std=c++17", f"-arch=sm_{arch}", "-cubin", "-o", cubin, *flags, source],
                                    capture_output=True, text=True, check=False)
            if result.returncode:
                words = re.search(r".*(?:error|fatal).*", result.stderr)
                what = "the extract" if source == alone else "the line"
                raise Refusal(f"nvcc does not compile {what} for sm_{arch}: "
                              f"{words.group(0) if words else result.stderr[:300]}", 1)
            words = (result.stderr or result.stdout).strip()
            if words and source == alone and line_is_silent:
                raise Refusal(f"nvcc warns about the extract: {words[:300]}", 1)
            line_is_silent = not words
            codes.append(machine_code(cubin))
    if not codes[0]:
        print(f"run_all.sh: {line.name} has no kernel of its own, so there was no machine code to compare",
              file=sys.stderr)
    if codes[0] != codes[1]:
        raise Refusal(f"the extract of {line.name} does not give the machine code of the line for sm_{arch}, so it "
                      "is not written: a bug of tools/extract.py", 1)


def main():
    parser = argparse.ArgumentParser(prog="./run_all.sh extract", add_help=False)
    parser.add_argument("name")
    parser.add_argument("--configs", required=True)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--nvcc", default="")
    parser.add_argument("--archs", default="")
    parser.add_argument("--keep", default="", help="write even what fails to verify to this file")
    options = parser.parse_args()
    with open(os.path.join(ROOT, "sdpa.cu"), encoding="utf-8") as file:
        source = file.read()
    knobs = known_knobs(source)
    line = Line(options.configs, options.name, knobs)
    if "USE_TUNED=1" in line.knobs:
        raise Refusal(f"{line.name} chooses between tiles at run time, and an extract has one; extract a line with its "
                      "tile typed, such as wgmma")
    text = extract(source, line, knobs, options.cxx)
    if options.keep:
        with open(options.keep, "w", encoding="utf-8") as file:
            file.write(text)
    if options.nvcc:
        for arch in (options.archs or line.arch or "90a").split(","):
            if line.arch and arch != line.arch:
                raise Refusal(f"{line.name} is built for sm_{line.arch} alone; drop --arch {arch}")
            verify(text, line, arch, options.nvcc)
    if line.expect == "FAIL":
        print(f"run_all.sh: {line.name} is marked expect=FAIL: its results are wrong on purpose; do not use it",
              file=sys.stderr)
    sys.stdout.write(text)


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        print(f"run_all.sh: {refusal}", file=sys.stderr)
        sys.exit(refusal.code)
