"""Generates mutations of source text from the syntax tree, and compiles many of them into one program with a switch.

Operators (the keys of OPERATORS and PYTHON_OPERATORS) generate mutations of C++ and Python. schemata() inserts
mutations into C++ text so that the environment variable MUTANT selects the active one at run time: an expression
becomes (MUTANT(17) ? mutated : original), a statement an if statement. Used by tests/bugs.py.
"""
import ast
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tools"))
from inlining import ATOMS, source  # noqa: E402
from minimal import callee, descendants, listed, name_of, parse  # noqa: E402

EXPRESSIONS = {"binary_expression", "unary_expression", "call_expression", "field_expression", "subscript_expression",
               "identifier", "number_literal", "parenthesized_expression", "conditional_expression",
               "assignment_expression", "update_expression", "pointer_expression", "cast_expression",
               "comma_expression", "true", "false", "string_literal", "concatenated_string", "qualified_identifier",
               "compound_literal_expression", "this"}
STATEMENTS = {"expression_statement", "if_statement", "for_statement", "for_range_loop", "while_statement",
              "return_statement", "compound_statement", "continue_statement", "break_statement"}
# A name that is a child of one of these is an expression; elsewhere it may be a type or a declarator.
OPERANDS = EXPRESSIONS - {"qualified_identifier"} | {
    "argument_list", "subscript_argument_list", "initializer_list", "init_declarator", "return_statement",
    "condition_clause", "expression_statement", "for_statement", "for_range_loop"}
# Nodes that are not evaluated at run time.
CONSTANT = {"template_argument_list", "template_parameter_list", "static_assert_declaration", "array_declarator",
            "sizeof_expression", "decltype", "alignas_qualifier", "enumerator", "gnu_asm_expression", "noexcept",
            "lambda_capture_specifier", "type_descriptor", "field_initializer_list", "preproc_def",
            "preproc_function_def", "preproc_call", "preproc_include"}


@dataclass(frozen=True)
class Mutation:
    file: str
    function: str
    operator: str
    line: int
    start: int  # of the expression that is replaced
    end: int
    original: str
    mutated: str

    def __str__(self):
        return f"{self.file}:{self.line} {self.function} [{self.operator}]\n    {self.original} -> {self.mutated}"


def one_line(text):
    """Code without comments and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"//.*", "", text)).strip()


# ---- nodes that can be switched at run time ----

def is_constant(node):
    """True if the compiler needs the value of this expression or its declaration."""
    if node.type in CONSTANT:
        return True
    if node.type in ("declaration", "field_declaration"):
        return any(child.text in (b"constexpr", b"static") for child in node.children)
    parent = node.parent
    if parent is not None and parent.type == "if_statement" and node.type == "condition_clause":
        return any(child.type == "constexpr" for child in parent.children)
    field = {"case_statement": "value", "preproc_if": "condition", "preproc_elif": "condition"}
    return parent is not None and parent.type in field and parent.child_by_field_name(field[parent.type]) == node


def is_operand(node):
    """True if a conditional expression can replace this node."""
    parent = node.parent
    if node.type not in EXPRESSIONS or parent is None:
        return False
    if node.type in ("identifier", "qualified_identifier") and parent.type not in OPERANDS:
        return False
    if parent.type == "init_declarator" and parent.child_by_field_name("value") != node:
        return False
    return parent.type != "concatenated_string" and not (
        parent.type == "call_expression" and parent.child_by_field_name("function") == node)


def switchable(root, text):
    """Yields (function, node) for all nodes in functions that are not constant, in order."""
    # The CPU backend's versions are in cpu_backend/.
    hidden = [range(*found.span()) for found in re.finditer(
        r"^#ifndef SDPA_SIMT\n.*?^#endif  // SDPA_SIMT", text, re.MULTILINE | re.DOTALL)]

    def walk(node, function):
        if is_constant(node) or any(node.start_byte in one for one in hidden):
            return
        if function:
            yield function, node
        if node.type == "function_definition" and is_function(node):
            function = qualified_name(node)
        for child in node.named_children:
            yield from walk(child, function)
    yield from walk(root, None)


def is_function(node):
    """False for a namespace whose name is a macro, which the grammar parses as a function."""
    declarator = node.child_by_field_name("declarator")
    while declarator is not None and declarator.type != "function_declarator":
        declarator = declarator.child_by_field_name("declarator") or next(
            (one for one in declarator.named_children if one.type.endswith("declarator")), None)
    return declarator is not None


def qualified_name(function):
    parent = function.parent.parent if function.parent.type == "template_declaration" else function.parent
    name = name_of(function.child_by_field_name("declarator"))
    return f"{name_of(parent.parent)}::{name}" if parent.type == "field_declaration_list" else name


# ---- operators on C++: each yields (node, mutated text) for a node ----

SYNCHRONISES = re.compile(r"barrier|fence|wait|arrive|commit|sync|release")
COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
SYMMETRIC = re.compile(r"^(f?(min|max)f?|(min|max)_nan|swap|CHECK\w*|fabs\w*)$")
# A condition that is constant in a build.
CONSTANTS = re.compile(r"(?:\b(?:B|Defines)::\w+|\w+<B(?:, \w+)*>|\b[A-Z][A-Z_0-9]*\b|\b\d+\b|(?:DType|KernelKind)::\w+|[^\w:])*")
# Functions that return their argument, except for its type.
SAME_VALUE = re.compile(r"(unsigned )?(int|char|float|double|bool)|u?int\d+_t|size_t|uniform|std::move")
WIDE = {"int64_t": "int", "uint64_t": "uint32_t", "size_t": "uint32_t"}


def sides(node, text):
    """The operator of a binary expression, and its sides."""
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    return text[left.end_byte:right.start_byte].strip(), left, right


def atom(node, text):
    return source(node, text) if node.type in ATOMS else f"({source(node, text)})"


def dropped_call(node, text, _):
    if node.type == "call_expression" and node.parent.type in ("expression_statement", "comma_expression") and (
            SYNCHRONISES.search(name_of(callee(node)))):
        yield node, "void()"


def comparison(node, text, _):
    if node.type == "binary_expression":
        operator, left, right = sides(node, text)
        if operator in COMPARED:
            yield node, f"{source(left, text)} {COMPARED[operator]} {source(right, text)}"


def bound(node, text, _):
    if node.type == "binary_expression":
        operator, _, right = sides(node, text)
        if operator in COMPARED and right.type != "number_literal":
            yield right, f"{atom(right, text)} {'- 1' if operator in ('<', '>=') else '+ 1'}"
    if node.type == "call_expression" and name_of(callee(node)) in ("min", "max", "ceil_div"):
        for argument in listed(node, "arguments"):
            for step in (" + 1", " - 1"):
                yield argument, atom(argument, text) + step


def swapped_arguments(node, text, declared):
    if node.type != "call_expression" or SYMMETRIC.match(name_of(callee(node))):
        return
    arguments = listed(node, "arguments")
    given = [source(one, text) for one in arguments]
    for types in declared.parameters.get((name_of(callee(node)), len(given)), ()):
        for i in range(len(given) - 1):
            if types[i] == types[i + 1] and given[i] != given[i + 1]:
                start, end = arguments[0].start_byte, arguments[-1].end_byte
                swapped = [*given[:i], given[i + 1], given[i], *given[i + 2:]]
                yield node, text[node.start_byte:start] + ", ".join(swapped) + text[end:node.end_byte]


def dropped_condition(node, text, _):
    if node.type == "binary_expression":
        operator, left, right = sides(node, text)
        if operator in ("&&", "||"):
            yield node, source(left, text)
            yield node, source(right, text)
    if node.type in ("condition_clause", "conditional_expression") and (
            node.type == "conditional_expression" or node.parent.type == "if_statement"):
        field = "value" if node.type == "condition_clause" else "condition"
        condition = node.child_by_field_name(field)
        if condition is not None and condition.type in EXPRESSIONS and not CONSTANTS.fullmatch(source(condition, text)):
            yield condition, "true"
            yield condition, "false"


def narrow_product(node, text, declared):
    if node.type == "call_expression":
        function = source(node.child_by_field_name("function"), text)
        if function in WIDE and len(listed(node, "arguments")) == 1:
            yield node, WIDE[function] + text[node.start_byte + len(function):node.end_byte]
    if node.type == "binary_expression":
        operator, left, right = sides(node, text)
        if operator == "*" and any(one.type == "field_expression" and "int64_t" in declared.types_of(name_of(
                one.child_by_field_name("field"))) for one in (left, right)):
            yield node, f"int({source(node, text)})"


def dropped_term(node, text, _):
    if node.type == "binary_expression":
        operator, left, right = sides(node, text)
        if operator in ("+", "-", "*", "/", "%"):
            yield node, source(left, text)
        if operator in ("+", "*"):
            yield node, source(right, text)


def unwrapped_call(node, text, _):
    if node.type == "call_expression" and len(listed(node, "arguments")) == 1 and not (
            SAME_VALUE.fullmatch(source(node.child_by_field_name("function"), text))):
        yield node, source(listed(node, "arguments")[0], text)


def neighbouring_member(node, text, declared):
    field = {"field_expression": "field", "qualified_identifier": "name"}.get(node.type)
    name = field and node.child_by_field_name(field)
    if name is not None and name.type in ("identifier", "field_identifier"):
        of = text[node.start_byte:name.start_byte]
        for other in declared.neighbours.get(source(name, text), ()):
            if of + other in declared.used:  # otherwise a member of another struct with the same name
                yield node, of + other


OPERATORS = {"dropped call": dropped_call, "comparison": comparison, "bound": bound,
             "swapped arguments": swapped_arguments, "dropped condition": dropped_condition,
             "narrow product": narrow_product, "dropped term": dropped_term, "unwrapped call": unwrapped_call,
             "neighbouring member": neighbouring_member}


class Declared:
    """The parameters of functions and the members of structs that texts declare."""

    def __init__(self, *texts):
        self.parameters = defaultdict(set)  # {(name, count): {types}}
        self.neighbours = defaultdict(list)  # neighbouring members of the same type in a struct
        self.types = defaultdict(set)
        self.used = set()  # texts of expressions that access a member
        for text in texts:
            root = parse(text)
            for function in descendants(root, "function_declarator"):
                parameters = listed(function, "parameters")
                types = tuple(re.sub(r"\s*=.*| ?\b\w+$", "", source(one, text)) for one in parameters)
                self.parameters[name_of(function), len(types)].add(types)
            self.used |= {source(one, text) for one in descendants(root, "field_expression", "qualified_identifier")}
            for struct in descendants(root, "struct_specifier", "class_specifier"):
                self.add_members(struct, text)

    def add_members(self, struct, text):
        body, members = struct.child_by_field_name("body"), []
        for field in body.named_children if body is not None else ():
            type_ = field.child_by_field_name("type")
            if field.type != "field_declaration" or type_ is None:
                continue
            for declarator in field.children_by_field_name("declarator"):
                if declarator.type in ("field_identifier", "pointer_declarator"):
                    type_of = source(type_, text) + "*" * (declarator.type == "pointer_declarator")
                    members.append((type_of, name_of(declarator)))
                    self.types[members[-1][1]].add(type_of)
        for (one, name), (other, next_name) in zip(members, members[1:]):
            if one == other:
                self.neighbours[name].append(next_name)
                self.neighbours[next_name].append(name)

    def types_of(self, member):
        return self.types.get(member, ())


def mutations(file, text, declared):
    """All mutations of a C++ file that can be switched."""
    root, found = parse(text), {}
    for function, node in switchable(root, text):
        for operator, mutated_by in OPERATORS.items():
            for target, mutated in mutated_by(node, text, declared):
                if is_operand(target):
                    place = target.start_byte, target.end_byte, one_line(mutated)
                    found.setdefault(place, Mutation(
                        file, function, operator, target.start_point[0] + 1, *place[:2],
                        one_line(source(target, text)), mutated))
    return list(found.values())


# ---- operators on Python ----

PYTHON_COMPARED = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
                   ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}


def python_mutated(node, segment):
    """(operator, node, mutated text) for a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in PYTHON_COMPARED:
        left, right = segment(node.left), segment(node.comparators[0])
        yield "comparison", node, f"{left} {PYTHON_COMPARED[type(node.ops[0])][1]} {right}"
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
            yield "bound", node.comparators[0], f"({right} + 1)"
    if isinstance(node, ast.BoolOp):
        joiner = " and " if isinstance(node.op, ast.And) else " or "
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1:]
            yield "dropped condition", node, "(" + joiner.join(segment(one) for one in rest) + ")"
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "dropped condition", node.test, "True"
        yield "dropped condition", node.test, "False"
    if isinstance(node, ast.Call) and not node.keywords and len(node.args) > 1 and isinstance(node.func, ast.Name) and (
            node.func.id not in ("min", "max", "print", "zip", "isinstance")):
        arguments = [segment(one) for one in node.args]
        arguments[:2] = arguments[1::-1]
        yield "swapped arguments", node, f"{segment(node.func)}({', '.join(arguments)})"


def python_mutations(file, text):
    """All mutations of the functions of a Python file."""
    starts, found = [0], {}
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    encoded = text.encode()

    def extent(node):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        return len(encoded[:first].decode()), len(encoded[:last].decode())

    def segment(node):
        return text[slice(*extent(node))]
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        inside_text = {id(one) for joined in ast.walk(function) if isinstance(joined, ast.JoinedStr)
                       for one in ast.walk(joined)}  # Python before 3.12 gives these no extents
        for node in ast.walk(function):
            if id(node) in inside_text:
                continue
            for operator, target, mutated in python_mutated(node, segment):
                place = *extent(target), one_line(mutated)
                found[place] = Mutation(file, function.name, operator, target.lineno, *place[:2],
                                        one_line(segment(target)), mutated)
    return list(found.values())


# ---- schemata ----

HEADER = """#pragma once
#include <cstdio>
#include <cstdlib>
namespace mutants {
struct State {
  int active = std::getenv("MUTANT") ? std::atoi(std::getenv("MUTANT")) : -1;
  unsigned char reached[COUNT] = {};
  ~State() {
    const char* path = std::getenv("MUTANTS_REACHED");
    FILE* file = path ? std::fopen(path, "w") : nullptr;
    for (int n = 0; file && n < COUNT; n++) {
      if (reached[n]) std::fprintf(file, "%d\\n", n);
    }
    if (file) std::fclose(file);
  }
};
inline State state;
inline bool is_active(int n) {
  __atomic_store_n(&state.reached[n], 1, __ATOMIC_RELAXED);
  return state.active == n;
}
}
#define MUTANT(n) (!__builtin_is_constant_evaluated() && mutants::is_active(n))
"""


@dataclass(frozen=True)
class Switch:
    """The position of a mutant: an expression or a statement."""
    start: int
    end: int
    number: int
    mutated: str
    is_statement: bool = False


def schemata(text, switches):
    """The text with all switches, and {line: number of the mutant on it}."""
    out, lines, line = [], {}, 1

    def put(piece, number=None):
        nonlocal line
        if number is not None:
            lines.update((line + i, number) for i in range(piece.count("\n") + 1))
        line += piece.count("\n")
        out.append(piece)

    def render(start, end, inside):
        """Emits a part of the text; inside: the switches in it, outer ones first."""
        at = start
        while inside:
            outer = inside[0]
            same = [one for one in inside if (one.start, one.end) == (outer.start, outer.end)]
            nested = [one for one in inside if one.end <= outer.end][len(same):]
            inside = inside[len(same) + len(nested):]
            put(text[at:outer.start])
            at = outer.end
            if outer.is_statement:
                put("{\n")
                for one in same:
                    put(f"if (MUTANT({one.number})) {{\n{one.mutated};\n}} else ", one.number)
                put("\n{\n")
                render(outer.start, outer.end, nested)
                put("\n}\n}")
            else:
                put("(\n")
                for one in same:
                    put(f"MUTANT({one.number}) ? (\n{one.mutated}\n) :\n", one.number)
                put("(")
                render(outer.start, outer.end, nested)
                put("))")
        put(text[at:end])
    render(0, len(text), sorted(switches, key=lambda one: (one.start, -one.end, one.number)))
    return "".join(out), lines


def changed_pieces(old, new):
    """[(start, end, new start, new end)] of the differences."""
    before, after = old.split("\n"), new.split("\n")
    if len(before) == len(after):
        groups = [(i, i + 1, i, i + 1) for i, pair in enumerate(zip(before, after)) if pair[0] != pair[1]]
    else:
        first = next(i for i, pair in enumerate(zip(before, after)) if pair[0] != pair[1])
        last = next(i for i, pair in enumerate(zip(before[::-1], after[::-1])) if pair[0] != pair[1])
        last = min(last, min(len(before), len(after)) - first)
        groups = [(first, len(before) - last, first, len(after) - last)]
    pieces, shift, at, line = [], 0, 0, 0
    for first, last, new_first, new_last in groups:
        at += sum(len(one) + 1 for one in before[line:first])
        line = first
        a, b = "\n".join(before[first:last]), "\n".join(after[new_first:new_last])
        front = len(os.path.commonprefix([a, b]))
        back = len(os.path.commonprefix([a[front:][::-1], b[front:][::-1]]))
        pieces.append((at + front, at + len(a) - back, at + shift + front, at + shift + len(b) - back))
        shift += len(b) - len(a)
    return pieces


def switches_of(old, new, number):
    """The difference of two texts as switches; None if it cannot be switched."""
    root, found, done = parse(old), [], -1
    pieces = changed_pieces(old, new)

    def extent_in_new(node):
        inside = [one for one in pieces if node.start_byte <= one[0] and one[1] <= node.end_byte]
        return node.start_byte + inside[0][2] - inside[0][0], node.end_byte + inside[-1][3] - inside[-1][1]

    def can_switch(node, function):
        start, end = extent_in_new(node)
        if node.type in STATEMENTS:
            return is_balanced(new[start:end])
        first, last = extent_in_new(function)
        return is_operand(node) and not above_constant(node) and is_expression(
            parse(new[first:last]), start - first, end - first)
    for start, end, *_ in pieces:
        if end <= done:
            continue
        node = root.descendant_for_byte_range(start, end)
        function = enclosing_function(node)
        while function is not None and node != function and not can_switch(node, function):
            node = node.parent
        if function is None or node == function:
            return None
        found.append(Switch(node.start_byte, node.end_byte, number, new[slice(*extent_in_new(node))],
                            node.type in STATEMENTS))
        done = node.end_byte
    return found


def enclosing_function(node):
    while node is not None and not (node.type == "function_definition" and is_function(node)):
        node = node.parent
    return node


def above_constant(node):
    while node is not None and node.type not in STATEMENTS:
        if is_constant(node):
            return True
        node = node.parent
    return False


def is_expression(root, start, end):
    node = root.descendant_for_byte_range(start, end)
    while node is not None and (node.start_byte, node.end_byte) == (start, end):
        if is_operand(node):
            return True
        node = node.parent
    return False


def is_balanced(text):
    text = re.sub(r"//.*|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)'", "", text)
    while True:
        shorter = re.sub(r"\([^()\[\]{}]*\)|\[[^()\[\]{}]*\]|\{[^()\[\]{}]*\}", "", text)
        if shorter == text:
            return not re.search(r"[()\[\]{}]", text)
        text = shorter
