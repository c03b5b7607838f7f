"""Evaluates constant conditions in C++ source, and removes dead branches and unreachable declarations.

A declaration is reachable if reachable code contains its name, in any scope. The order and the layout of the source are
preserved. tree-sitter parses the source. Used by tools/extract.py.
"""
import collections
import functools
import itertools
import operator
import re
import textwrap

import tree_sitter
import tree_sitter_cpp

CALLS = {"sdpa_forward", "sdpa_workspace_bytes", "sdpa_scratch_bytes", "sdpa_map_bias", "sdpa_bias_map_bytes", "sdpa_backward",
         "sdpa_backward_workspace_bytes"}
ROOTS = {*CALLS, "SdpaParams", "SdpaStatus", "ok"}
# Functions of other files that only compute a value, or ask for a number of the device.
PURE = {"min", "max", "fabsf", "fmaxf", "fminf", "fmax", "fmin", "ceil", "sqrt", "int", "uint32_t", "int64_t", "size_t", "double", "float",
        "cudaGetDevice", "cudaDeviceGetAttribute"}
BYTES = {"__half": 2, "__nv_bfloat16": 2, "__nv_fp8_e4m3": 1, "uint8_t": 1}
ELEMENTS = {"__half", "__nv_bfloat16", "__nv_fp8_e4m3"}
HEADERS = {"cuda.h": r"\bCU[a-z_]", "cuda_bf16.h": "__nv_bf", "cuda_fp8.h": "__nv_fp8", "cuda_fp16.h": "__half",
           "mma.h": "nvcuda", "string_view": "std::string_view", "type_traits": "std::(conditional|common_type)"}
BANNERS = "// ----", "// ===="
WIDTH = 120
OPERATORS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
             ">=": operator.ge, "&": operator.and_, "+": operator.add, "-": operator.sub, "*": operator.mul,
             "/": lambda a, b: a // b if a >= 0 < b else None, "%": lambda a, b: a % b if a >= 0 < b else None}
# Neutral elements of operators, as left and right operands.
NEUTRAL = {"*": ("1", "1"), "/": ("", "1"), "+": ("0", "0"), "-": ("", "0"), "&&": ("True", "True"),
           "||": ("False", "False")}


# ---- the syntax tree ----

LANGUAGE = tree_sitter.Language(tree_sitter_cpp.language())
PARSER = tree_sitter.Parser(LANGUAGE)
# CUDA syntax that the C++ grammar does not have.
MASKED = re.compile(r"SDPA_UNROLL(?= (?:for|while))|__(?:device|global|host|forceinline|grid_constant|shared)__|"
                    r"\btypename(?= [\w:]+(?:<[^;(){}]*>[\w:]*)?[({])|"  # of an object that is made, not declared
                    r"__align__\(\w+\)|__launch_bounds__\((?:[^()]|\([^()]*\))*\)|(?<=\" )#(?=\w)")
# A "<" that the parser could mistake for a template bracket, and multi-byte characters.
REPLACED = re.compile(r"(?<= )<(?=\s)|[^\x00-\x7f]")


@functools.lru_cache(4)
def parse(text):
    """The root of the syntax tree of a text, with the same offsets."""
    return PARSER.parse(REPLACED.sub("^", MASKED.sub(lambda m: " " * len(m[0]), text)).encode()).root_node


@functools.lru_cache(None)
def pattern(types):
    return tree_sitter.Query(LANGUAGE, f"[({') ('.join(types)})] @found")


@functools.lru_cache(4)
def nodes_of(root):
    """{type: its nodes, in order} of a whole tree. One walk costs as much as three queries."""
    found, cursor = collections.defaultdict(list), root.walk()
    while True:
        found[cursor.node.type].append(cursor.node)
        if cursor.goto_first_child():
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return found


@functools.lru_cache(1000)
def descendants(node, *types):
    """All nodes of these types in a subtree, in order."""
    if node.parent is None:
        found = itertools.chain(*(nodes_of(node)[one] for one in types))
    else:
        query = pattern(types)  # versions before 0.25 lack QueryCursor
        found = getattr(tree_sitter, "QueryCursor", lambda query: query)(query).captures(node).get("found", [])
    return sorted(found, key=lambda one: (one.start_byte, -one.end_byte))


def enclosing(node, *types):
    while node is not None and node.type not in types:
        node = node.parent
    return node


def name_of(node):
    """The last component of the name in an expression or declarator, without template arguments."""
    while node is not None and node.type not in (
            "identifier", "field_identifier", "type_identifier", "namespace_identifier"):
        node = (node.child_by_field_name("name") or node.child_by_field_name("declarator") or
                next((one for one in node.children if one.type.endswith(("declarator", "identifier"))), None))
    return node.text.decode() if node else ""


def words_of(text):
    return set(re.findall(r"\w+", text))


def declared(node):
    """The declaration inside template <...>."""
    while node.type == "template_declaration":
        node = node.named_children[-1]
    return node


def callee(call):
    function = call.child_by_field_name("function")
    return function.child_by_field_name("field") or function


def listed(node, field):
    """The elements of a node's "parameters" or "arguments"."""
    found = node.child_by_field_name(field)
    return found.named_children if found else []


def parameters_of(node):
    return [name_of(one) for one in listed(node, "parameters")]


def aliases_of(text):
    """{alias: type} of the aliases of types in a file."""
    return dict(re.findall(r"^using (\w+) = (\w+);", text, re.MULTILINE))


# ---- conditions that depend on knobs ----

GONE = "\0"  # marks a removed statement
# Contexts in which an expression needs no parentheses.
WHOLE = {"condition_clause", "init_declarator", "field_declaration", "return_statement", "parenthesized_expression"}
# Nodes with the value of their only child.
SINGLE = {"parenthesized_expression", "type_descriptor", "condition_clause", "compound_statement", "return_statement"}


# Nodes whose text depends on constants. The first four may be aliases of types.
DECIDABLE = {"qualified_identifier", "dependent_type", "type_descriptor", "template_type", "binary_expression", "unary_expression",
             "call_expression", "template_function", "conditional_expression", "static_assert_declaration", "while_statement",
             "template_declaration", "expression_statement", "return_statement", "comma_expression", "for_statement", "do_statement",
             "if_statement", "preproc_function_def"}
DECIDED = {}  # cache of declarations, by what determines their text


class Folding:
    """Evaluates conditions on constants in a text; the result is `out`."""

    def __init__(self, text, sizes):
        self.text, root = text, parse(text)
        self.enums = {name_of(node): [name_of(one) for one in descendants(node, "enumerator")]
                      for node in descendants(root, "enum_specifier")}
        # Names of variables and parameters, which may hide constants: of functions in functions only, of templates everywhere.
        named = descendants(root, "parameter_declaration", "init_declarator")
        self.of_templates = {name_of(one) for one in named if one.parent.type == "template_parameter_list"}
        self.local = {name_of(one) for one in named if one.type != "init_declarator" or enclosing(one, "compound_statement")}
        # {alias template: its parameters and type}.
        self.aliases = {name_of(declared(node)): (parameters_of(node), declared(node).child_by_field_name("type"))
                        for node in descendants(root, "template_declaration")
                        if declared(node).type == "alias_declaration"}
        self.bound = {}  # parameters of the alias being expanded
        self.types = aliases_of(text)
        self.elements = self.find_elements(root)
        # Functions whose overloads all do nothing, and functions with side effects.
        bodies, calls, self.acting = collections.defaultdict(set), collections.defaultdict(set), set()
        for node in descendants(root, "function_definition"):
            calls[name_of(node)] |= self.called(node)
            bodies[name_of(node)].add(self.source(node.child_by_field_name("body") or node))
            if descendants(node, "expression_statement", "gnu_asm_expression"):
                self.acting.add(name_of(node))
        self.defined = bodies.keys()
        more = {None}
        while more:  # functions that call them, or a function of another file
            more = {name for name, called in calls.items() if called & self.acting or called - self.defined - PURE} - self.acting
            self.acting |= more
        self.idle = {name for name, texts in bodies.items()
                     if all(re.fullmatch(r"{\s*(return;)?\s*}", text) for text in texts)}
        self.constants = {}  # by name; "name()" for functions
        self.sets = {}  # the possible values of enumerations that depend on what is unknown
        self.find_constants(root, sizes)
        # Values of the default arguments of each template, and of the arguments of each use.
        self.defaults = {name_of(declared(node)): [self.value(one.child_by_field_name("default_value"))
                                                   for one in listed(node, "parameters")]
                         for node in reversed(descendants(root, "template_declaration"))}
        self.uses = collections.defaultdict(list)
        for node in descendants(root, "template_type", "template_function"):
            if node.parent.type not in ("struct_specifier", "function_declarator"):
                self.uses[name_of(node)].append(self.arguments(node))
        self.out = self.emit(root)

    def source(self, node):
        return self.text[node.start_byte:node.end_byte]

    def find_elements(self, root):
        """The possible types of a template parameter E; empty while an alias still selects among them."""
        types = {self.source(node.child_by_field_name("type")) for node in descendants(root, "alias_declaration")}
        found = {text for text in types if ELEMENTS & words_of(text)}
        return found if found <= ELEMENTS else set()

    def find_constants(self, root, sizes):
        """Values of constexpr variables and functions, if all declarations of a name have the same value."""
        found = []
        for node in descendants(root, "field_declaration", "declaration", "function_definition"):
            if node.child_by_field_name("body"):
                found.append((name_of(node) + "()", node.child_by_field_name("body")))
            if b"constexpr" in [one.text for one in node.children]:
                found += [(name_of(one), init) for part in (node, *node.children)
                          for one, equals, init in zip(part.children, part.children[1:], part.children[2:])
                          if equals.type == "="]
        before = None
        while self.constants != before:  # a constant may depend on later ones
            before, seen = self.constants, collections.defaultdict(set)
            for name, init in found:
                value = None if name in sizes else self.value(init)
                seen[name].add((type(value), value))
            self.constants = {name: values.pop()[1] for name, values in seen.items() if len(values) == 1}
        inits = collections.defaultdict(list)
        for name, init in found:
            inits[name].append(init)
        for name, (init, *others) in inits.items():
            if self.constants.get(name) is None and not others and init.type == "conditional_expression":
                self.sets[name] = self.possible(init)

    def possible(self, node):
        """The enumerators that an expression may have as its value; empty if unknown."""
        value = self.value(node)
        if value is not None:
            return frozenset([value]) if isinstance(value, str) else frozenset()
        if node.type in ("identifier", "qualified_identifier", "template_function"):
            return self.sets.get(name_of(node), frozenset())
        if node.type != "conditional_expression":
            return frozenset()
        chosen = self.value(node.child_by_field_name("condition"))
        parts = [self.possible(node.child_by_field_name(branch)) for branch, of in (("consequence", True), ("alternative", False))
                 if chosen in (None, of)]
        return frozenset().union(*parts) if all(parts) else frozenset()

    def value(self, node):
        """The value of an expression: a bool, a number or an enumerator ("DType::fp16"); None if it is not constant."""
        if node is None:
            return None
        kind, text, field = node.type, self.source(node), node.child_by_field_name
        if kind in ("true", "false"):
            return kind == "true"
        is_element = re.fullmatch(r"std::is_same_v<E, (\w+)>", text)
        if is_element and is_element[1] in ELEMENTS and self.elements:
            return self.elements == {is_element[1]} or None if is_element[1] in self.elements else False
        if kind == "number_literal":
            return int(text) if text.isdigit() else None
        if kind in SINGLE:
            return self.value(node.named_children[0]) if len(node.named_children) == 1 else None
        if kind in ("identifier", "type_identifier"):
            is_local = text in self.local and (text in self.of_templates or enclosing(node, "function_definition"))
            return self.bound.get(text, None if is_local else self.constants.get(text))
        if kind in ("template_function", "template_type"):
            return self.constants.get(name_of(node))
        if kind == "sizeof_expression":
            return BYTES.get(self.types.get(name_of(node.named_children[0])))
        if kind == "qualified_identifier":
            scope, _, name = text.rpartition("::")
            if name in self.enums.get(scope, ()):
                return text
            return None if scope.startswith("std") else self.constants.get(name)
        if kind == "call_expression":
            name, arguments = name_of(callee(node)), listed(node, "arguments")
            if name not in self.enums or len(arguments) != 1:
                return None if name in self.local else self.constants.get(name + "()")
            number = self.value(arguments[0])
            return None if number is None else f"{name}::{self.enums[name][number]}"
        if kind == "unary_expression" and text[0] == "!":
            value = self.value(field("argument"))
            return None if value is None else not value
        if kind == "conditional_expression":
            value = self.value(field("condition"))
            return None if value is None else self.value(field("consequence" if value else "alternative"))
        if kind == "binary_expression":
            sign, sides = self.source(field("operator")), [self.value(field("left")), self.value(field("right"))]
            if sign in ("&&", "||"):
                known = [one for one in sides if isinstance(one, bool)]
                return (sign == "||") if (sign == "||") in known else None if len(known) < 2 else sign == "&&"
            if None in sides and sign in ("==", "!="):
                sets = [self.possible(field(side)) for side in ("left", "right")]
                return sign == "!=" if all(sets) and not sets[0] & sets[1] else None
            is_known = sign in OPERATORS and (sign in ("==", "!=") or all(isinstance(one, int) for one in sides))
            return OPERATORS[sign](*sides) if is_known and None not in sides else None
        return None

    def arguments(self, node):
        values = [self.value(one) for one in listed(node, "arguments")]
        return values + self.defaults.get(name_of(node), [])[len(values):]

    @staticmethod
    def called(node):
        """The names of the functions and types that are called in a subtree."""
        return {name_of(callee(one)) or callee(one).text.decode() for one in descendants(node, "call_expression")}

    def acts(self, node):
        """True if an expression may call a function with side effects."""
        names = self.called(node) - PURE
        return bool(names & self.acting or names - self.defined)

    def does_nothing(self, node):
        """True if an expression has no effect: it calls an empty function, assigns a name to itself, or joins such expressions."""
        field = node.child_by_field_name
        if node.type == "call_expression":
            return name_of(callee(node)) in self.idle and not self.acts(field("arguments"))
        if node.type == "assignment_expression":
            sides = self.emit(field("left")), self.emit(field("right")).strip("()")
            return self.source(field("operator")) == "=" and sides[0] == sides[1]
        return node.type == "comma_expression" and all(map(self.does_nothing, (field("left"), field("right"))))

    def is_unselected(self, node):
        """True if no use of the template selects this specialization."""
        of_type = declared(node).child_by_field_name("name") if node.type == "template_declaration" else None
        own = descendants(declared(node).child_by_field_name("declarator") or node, "template_function") if (
            node.type == "template_declaration" and declared(node).type == "function_definition") else []
        name = own[0] if own else of_type
        uses = self.uses[name_of(name)] if name and name.type in ("template_type", "template_function") else []
        return bool(uses) and any(value is not None and all(use[i] not in (None, value) for use in uses)
                                  for i, value in enumerate(self.arguments(name)))

    def known(self, node):
        """The cache key of a declaration: its words, the words of its aliases, and the known values of each."""
        words, more = set(), words_of(self.source(node))
        while more:
            words |= more
            more = words_of(" ".join(self.source(self.aliases[word][1]) for word in more & self.aliases.keys())) - words
        known = [(word, *(found.get(word) for found in (self.constants, self.uses, self.defaults, self.enums)),
                  sorted(self.sets.get(word, ())),
                  self.constants.get(word + "()"),
                  *(word in names for names in (self.local, self.idle, self.acting, self.defined)),
                  word in self.aliases and (self.aliases[word][0], self.source(self.aliases[word][1])))
                 for word in sorted(words)]
        return self.source(node), repr((node.start_point[1], self.elements, known))

    def emit(self, node):
        """The text of a node after evaluating conditions."""
        if not node.child_count:
            return self.source(node)
        if not node.parent or node.parent.type not in ("translation_unit", "declaration_list") or (
                node.type == "namespace_definition"):
            return self.decided(node)
        known = self.known(node)
        if known not in DECIDED:
            DECIDED[known] = self.decided(node)
        return DECIDED[known]

    def decided(self, node):
        """emit() for nodes with children."""
        kind, field = node.type, node.child_by_field_name
        if kind not in DECIDABLE:
            return self.emit_children(node)
        if kind in ("binary_expression", "unary_expression", "call_expression"):
            value = self.value(node)
            if isinstance(value, bool):
                return "true" if value else "false"
        instead = self.expand(node) if kind in ("template_type", "template_function") else None
        if instead:
            return instead
        if kind == "conditional_expression":
            value = self.value(field("condition"))
            if value is not None:
                return self.emit(field("consequence" if value else "alternative"))
            sides = self.emit(field("consequence")), self.emit(field("alternative"))
            if sides[0] == sides[1] and not self.acts(field("condition")):
                return sides[0]
        if kind == "binary_expression" and not descendants(node, "call_expression"):
            is_zero = type(self.value(node)) is int and self.value(node) == 0
            if is_zero or self.source(field("operator")) == "*" and "0" in [self.emit(field(side)) for side in ("left", "right")]:
                return "0"
        if kind == "binary_expression" and self.source(field("operator")) in NEUTRAL:
            sides = field("left"), field("right")
            for side, other, neutral in zip(sides, sides[::-1], NEUTRAL[self.source(field("operator"))]):
                is_number = neutral.isdigit()  # keeps sums of sizes as written
                if repr(self.value(side)) == neutral and not (is_number and descendants(side, "binary_expression")):
                    is_whole = other.type == "parenthesized_expression" and node.parent.type in WHOLE
                    text = self.emit(other)  # possibly without parentheses
                    return text[1:-1] if is_whole and text[0] == "(" else text
        if re.match(r"(typename )?std::conditional(_t<(.|\n)*>|<(.|\n)*>::type)$", self.source(node)):
            condition, *types = descendants(node, "template_argument_list")[0].named_children
            value = self.value(condition)
            if value is not None and not self.source(types[not value]).endswith("]"):
                return self.emit(types[not value])
        does_nothing = {"static_assert_declaration": True, "while_statement": False}.get(kind)
        if does_nothing is not None and self.value(field("condition")) is does_nothing or self.is_unselected(node):
            return GONE
        if kind == "expression_statement" and node.named_children and self.does_nothing(node.named_children[0]):
            return GONE
        if kind == "return_statement" and node.named_children and self.does_nothing(node.named_children[0]):
            return "return;"
        is_for_nothing = node.parent and node.parent.type in ("expression_statement", "comma_expression")
        if kind == "call_expression" and is_for_nothing and name_of(callee(node)) in self.idle:  # the arguments may have side effects
            return ", ".join(self.emit(one) for one in listed(node, "arguments") if self.acts(one))
        if kind == "expression_statement" and isinstance(self.value((node.named_children or [None])[0]), bool):
            return GONE
        if kind == "comma_expression":
            for side, other in (("left", "right"), ("right", "left")):
                if self.does_nothing(field(side)):
                    return self.emit(field(other))
        if kind == "for_statement" and (re.fullmatch(rf"{{?\s*{GONE}\s*}}?", self.emit(field("body"))) or self.runs_never(node)):
            return GONE
        if kind == "do_statement" and self.value(field("condition")) is False and not self.is_left(node):
            return self.unwrapped(field("body"), node)
        if kind == "if_statement":
            return self.emit_if(node)
        if kind == "preproc_function_def" and "std::is_same_v<E," in self.source(node):
            return self.emit_macro(node)
        return self.emit_children(node)

    @staticmethod
    def is_left(loop):
        """True if a loop has a break or continue."""
        return any(enclosing(one, "do_statement", "for_statement", "for_range_loop", "while_statement") == loop
                   for one in descendants(loop, "break_statement", "continue_statement"))

    def runs_never(self, node):
        """True if a loop counts from 0 to 0."""
        condition = node.child_by_field_name("condition")
        counter = re.match(r"for \(int (\w+) = 0; \1 < ", self.source(node))
        return bool(counter) and condition.type == "binary_expression" and (
            repr(self.value(condition.child_by_field_name("right"))) == "0")

    def expand(self, node):
        """The type of an alias, if it uses none of its parameters or passes all of them on; else None."""
        if name_of(node) not in self.aliases:
            return None
        parameters, type_of = self.aliases[name_of(node)]
        before, self.bound = self.bound, dict(zip(parameters, self.arguments(node)))
        text = self.emit(type_of)
        self.bound = before
        if text == f"{text.partition('<')[0]}<{', '.join(parameters)}>":
            return text.partition("<")[0] + self.source(node.child_by_field_name("arguments"))
        return None if words_of(text) & {*parameters, "conditional_t"} else text

    def unread(self, node):
        """The declarators of a declaration whose local variables no code uses, and whose initializers only compute a value."""
        if node.has_error:
            return []
        named = collections.Counter(re.findall(r"\w+", re.sub("//.*", "", self.source(node.parent))))
        named.subtract(self.source(one) for one in descendants(node.parent, "field_identifier"))
        return [one for one in node.children_by_field_name("declarator") if named[name_of(one)] == 1 and not any(
            each.parent.type != "call_expression" for each in descendants(one, "argument_list")) and (
                self.called(one) <= PURE | self.defined - self.acting)]

    def emit_declaration(self, node):
        """The text of a declaration in a block, without unread variables."""
        own, gone = node.children_by_field_name("declarator"), self.unread(node)
        kept = [one for one in own if one not in gone]
        if not gone or not kept:
            return GONE if gone else self.emit(node)
        return self.text[node.start_byte:own[0].start_byte] + ", ".join(map(self.emit, kept)) + ";"

    def emit_macro(self, node):
        """Evaluates conditions on types in a macro."""
        before, source = self.text, self.source(node)
        head, *body = [line.rstrip(" \\") for line in source.rstrip().split("\n")]
        self.text = "\n".join(["void f() {", *body, "}"])
        lines = [head, *without_gone(self.emit(parse(self.text))).split("\n")[1:-1]]
        self.text, width = before, max(map(len, lines)) + 1
        return " \\\n".join([*(line.ljust(width - 1) for line in lines[:-1]), lines[-1]]) + "\n" * source.endswith("\n")

    def emit_children(self, node):
        out, at, unreachable, in_block = [], node.start_byte, False, node.type == "compound_statement"
        for child in node.children:
            emit = self.emit_declaration if in_block and child.type == "declaration" else self.emit
            out += [self.text[at:child.start_byte], GONE if unreachable and child.is_named else emit(child)]
            at = child.end_byte
            chosen = in_block and child.type == "if_statement" and self.chosen(child)
            ends = (child, *((chosen, *chosen.named_children[-1:]) if chosen else ()))
            unreachable = unreachable or in_block and "return_statement" in [one.type for one in ends]
        text = "".join([*out, self.text[at:node.end_byte]])
        is_bare = node.type == "parenthesized_expression" and node.parent.type not in ("sizeof_expression", "do_statement")
        is_bare = is_bare and text != self.source(node) and re.fullmatch(r"\([\w:.<>]+(\(\))?\)", text)
        return text[1:-1] if is_bare else text

    def chosen(self, node):
        """The branch that an if statement takes; None if unknown or if there is none."""
        value, other = self.value(node.child_by_field_name("condition")), node.child_by_field_name("alternative")
        if value is None:
            return None
        return node.child_by_field_name("consequence") if value else other and other.named_children[-1]

    def emit_if(self, node, first=None):
        """The text of an if statement after evaluation. first: the start of a chain of evaluated ones."""
        first, chosen = first or node, self.chosen(node)
        if self.value(node.child_by_field_name("condition")) is None:
            is_empty = re.fullmatch(rf"{{?[\s{GONE}]*}}?", self.emit(node.child_by_field_name("consequence")))
            does = not is_empty or node.child_by_field_name("alternative") or (
                self.acts(node.child_by_field_name("condition")) and is_empty[0] != GONE)
            return re.sub(rf"\s*else\s*{GONE}$", "", self.emit_children(node)) if does else GONE
        if chosen is None:
            return GONE
        return self.emit_if(chosen, first) if chosen.type == "if_statement" else self.unwrapped(chosen, first)

    def unwrapped(self, block, node):
        """Replaces an if statement by the statements of a block, in braces if names would clash."""
        text = self.emit(block)
        if block.type != "compound_statement" or node.parent.type != "compound_statement":
            return text
        names = [name_of(one) for statement in block.named_children if statement.type == "declaration"
                 for one in statement.children_by_field_name("declarator")]
        words = [re.findall(r"\w+", self.source(one)) for one in (enclosing(node, "function_definition"), block)]
        if any(words[0].count(name) > words[1].count(name) for name in names):
            return text
        return textwrap.indent(textwrap.dedent(text[1:-1].strip("\n").rstrip()), " " * node.start_point[1]).lstrip()


def without_gone(text):
    """Removes the marks of removed statements and the comments above them."""
    words = "static |__host__ |__device__ |__forceinline__ |SDPA_UNROLL "
    gone = rf"(?:^ *//(?! ----| ====).*\n)*^ *(?:{words})*{GONE}[{GONE} ]*(?://.*)?\n"
    return re.sub(gone, "", text, flags=re.MULTILINE).replace(GONE, "")


def without_sentences(comment, start):
    """A comment without the sentences, and parts of sentences up to a semicolon, that match a pattern at their start."""
    indent = re.match(r" *// ?", comment)[0]
    said = re.split(r"(?<=[.;])\s+", " ".join(line.strip()[3:] for line in comment.splitlines()))
    kept = " ".join(one for one in said if not re.match(start, one))
    if kept == " ".join(said):
        return comment
    kept = re.sub(r";$", ".", kept)
    return "".join(f"{indent}{line}\n" for line in textwrap.wrap(kept, WIDTH - len(indent)))


# ---- unreachable declarations ----

FACTS = {}  # cache of declarations, by their text


class Unit:
    """A declaration with its comment and lines, the names that it declares, and the names that it uses. ".name" is a member
    access, "name(" a function call."""

    def __init__(self, node, lines, struct=None):
        self.struct, self.reached = struct, False
        start, end = node.start_point[0], node.end_point[0] - (node.end_point[1] == 0)
        is_comment = re.compile(r"(?!// ----|// ====)\s*//").match
        above, below = (len(list(itertools.takewhile(is_comment, others)))
                        for others in (lines[start - 1::-1], lines[end + 1:]))
        # A comment may belong to the section or to the next declaration.
        self.first = start if lines[start - above - 1].startswith(BANNERS) else start - above
        self.last = end if lines[end + below + 1].strip() else end + below
        inner = declared(node)
        body = inner.child_by_field_name("body")
        self.parts = units_of(body, lines, self) if inner.type == "struct_specifier" and body else []
        own = [lines[n] for n in range(start, end + 1) if not any(part.first <= n <= part.last for part in self.parts)]
        known = "\n".join(lines[start:end + 1]), node.start_point[1], bool(struct)
        if known not in FACTS:
            FACTS[known] = self.facts(node, inner, body, "\n".join(own))
        self.__dict__.update(FACTS[known])
        for part in self.parts:
            self.take_names_of(part)

    def facts(self, node, inner, body, own):
        """Computes the attributes that depend only on the text."""
        names = {name_of(one) for field in ("declarator", "name") for one in inner.children_by_field_name(field)}
        if b"class" not in [one.text for one in inner.children]:
            names |= {name_of(one) for one in descendants(inner, "enumerator")}
        is_data = inner.type == "field_declaration" and b"static" not in [one.text for one in inner.children] and (
            not descendants(inner, "function_declarator"))
        # Structs whose members it accesses without an object: its bases, and the struct of a member defined outside.
        scopes = {name_of(one.child_by_field_name("scope")) for one in descendants(inner, "qualified_identifier")
                  if one.parent.type == "function_declarator" and one.start_byte < (body or inner).start_byte}
        bases = {word for one in inner.children if one.type == "base_class_clause"
                 for word in words_of(one.text.decode())}
        made = {name_of(one) for one in descendants(inner, "parameter_declaration", "init_declarator")
                } if self.struct or scopes else set()
        code = re.sub(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"', " ", own)
        uses = {bool(dot) * "." + name for dot, name in re.findall(
            r"(\.|->|::)?(?:template )?\b([A-Za-z_]\w*)", code)} - (names if is_data else set())
        uses |= {f"{bool(dot) * '.'}{name}(" for dot, name in re.findall(
            r"(\.|->|::)?(?:template )?\b([A-Za-z_]\w*)(?=[(<])", code)}
        return dict(kind=inner.type, names=names, is_data=is_data, scopes=scopes, bases=bases, made=made, uses=uses,
                    has_default=inner.child_by_field_name("default_value") is not None,
                    types=signature_types(node) if inner.type == "function_definition" and not self.struct else set(),
                    begins=tuple(re.findall(r"(\w+)##", code)))  # names that a macro declares

    def take_names_of(self, part):
        """Converts names that a part of this struct uses without an object to member accesses."""
        own = {name: f".{name}" + "(" * (not one.is_data) for one in self.parts for name in one.names - self.names}
        part.uses = {own.get(name, name) for name in part.uses - part.made if name[:-1] not in own} | {
            f".{name}" for name in part.uses & own.keys() - part.made}


def signature_types(node):
    """The types in a function's signature, except template parameters."""
    parameters = {name_of(one) for one in descendants(node, "type_parameter_declaration", "template_parameter_list")}
    parts = [part for part in declared(node).children if part.type != "compound_statement"]
    return {one.text.decode() for part in parts for one in descendants(part, "type_identifier")} - parameters


def units_of(node, lines, struct=None):
    """The declarations in a file, a namespace or a struct."""
    units = []
    for one in node.children:
        if one.type == "namespace_definition":
            units += units_of(one.child_by_field_name("body"), lines)
        elif one.is_named and one.type not in ("comment", "preproc_call", "preproc_include", "access_specifier"):
            units.append(Unit(one, lines, struct))
    return units


def without_unused(text):
    """Removes declarations that are not reachable from the roots. Data members are kept, since they determine offsets, except
    options, which all have defaults, and empty members at the end of a struct."""
    lines = text.split("\n")
    top = units_of(parse(text), lines)
    units = top + [part for unit in top for part in unit.parts]
    asserts = [unit for unit in units if unit.kind == "static_assert_declaration"]
    versions = collections.Counter(name for unit in top for name in unit.names)
    empty = {name for unit in top if unit.kind == "struct_specifier" and not unit.parts for name in unit.names}
    for unit, struct in itertools.product(top, top):
        if struct.names & unit.scopes and struct.parts:
            struct.take_names_of(unit)
    structs = collections.defaultdict(list)
    for unit in top:
        for name in unit.names if unit.kind == "struct_specifier" else ():
            structs[name].append(unit)
    bases = set().union(*(unit.bases for unit in top))
    names, begins, before = set(ROOTS), (), None

    def is_named(unit):
        own = {f".{name}" + "(" * (unit.kind == "function_definition") for name in unit.names
               if unit.struct or unit.scopes}
        if not unit.struct or unit.struct.names & (unit.names | bases):
            own |= unit.names
        return own & names or any(name.startswith(begins) for name in unit.names)
    while before != len(names):
        before = len(names)
        for unit in units:
            if unit.reached or unit in asserts or unit.struct and not unit.struct.reached:
                continue
            if unit.scopes and not any(one.reached for name in unit.scopes for one in structs[name]):
                continue  # a member of an unused struct
            named = is_named(unit)
            if named and any(versions[name] > 1 for name in unit.names) and (
                    unit.types - {name.strip(".(") for name in names}):
                continue  # a specialization for an unused type
            is_needless = unit.is_data and (all(one.has_default for one in unit.struct.parts) or (
                unit.uses & empty and unit is [one for one in unit.struct.parts if one.is_data][-1]))
            if named or unit.is_data and not is_needless or not unit.names - {""}:
                unit.reached = True
                names |= unit.uses
                begins += unit.begins
    unused = {name for unit in units for name in unit.names} - {name.strip(".(") for name in names}
    for unit in asserts:
        unit.reached = not {name.strip(".(") for name in unit.uses} & unused
    gone = {n for unit in units if not unit.reached for n in range(unit.first, unit.last + 1)}
    return "\n".join(line for n, line in enumerate(lines) if n not in gone)


def tidy(text):
    """Removes empty sections, double blank lines and unneeded headers."""
    def section(match):
        if re.search(r"^(?!//|namespace|}  // namespace).", match[1], re.MULTILINE):
            return match[0]
        return "".join(re.findall(r"^(?:namespace|}).*\n", match[1], re.MULTILINE)) + "\n"
    text = re.sub(r"#if .*\n#endif.*\n", "", text)
    for banner, ends in (("----", "[-=]{4}"), ("====", "====")):
        text = re.sub(rf"^// {banner} .*\n((?:(?!// {ends}).*\n)*)", section, text, flags=re.MULTILINE)
    text = re.sub(r"^( +)// ---- .* ----\n(?:[ \n]*\n)?(?=\1// ----| *\};)", "", text, flags=re.MULTILINE)  # in a struct
    code = re.sub("//.*", "", text)
    text = re.sub(r"^#include <(.*)>\n", lambda m: m[0] if re.search(HEADERS.get(m[1], ""), code) else "", text,
                  flags=re.MULTILINE)
    return re.sub(r"\n(?=\n *};?\n)|(?<={\n)\n(?= )|\n(?=\n\n)", "", text)


MINIMAL = set()  # texts that are fully evaluated, by size


def minimal(text, sizes):
    """Evaluates the conditions on constants and removes unreachable declarations, until nothing changes."""
    sizes, before = frozenset(sizes), None
    while text != before and (text, sizes) not in MINIMAL:
        before, text = text, tidy(without_unused(without_gone(Folding(text, sizes).out)))
    MINIMAL.add((text, sizes))
    return text
