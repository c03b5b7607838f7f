"""Inlines function calls in source text: small expressions, and bodies of functions with one call. Used by
tools/concrete.py."""
import collections
import itertools
import re
import textwrap

from minimal import (callee, declared, descendants, enclosing, listed, name_of, parse, without_sentences,
                     words_of)

SCALARS = {"int", "unsigned", "uint32_t", "int64_t", "uint64_t", "size_t", "float", "double", "bool", "uint16_t",
           "uint8_t", "char"}
# Contexts in which an expression needs no parentheses, and expressions that never need them.
WHOLE = {"argument_list", "initializer_list", "init_declarator", "return_statement", "parenthesized_expression",
         "subscript_argument_list",
         "condition_clause", "expression_statement"}
ATOMS = {"identifier", "number_literal", "field_expression", "call_expression", "subscript_expression",
         "parenthesized_expression", "true",
         "false", "string_literal", "qualified_identifier", "this", "null"}
# Functions of CUDA that return float.
FLOATS = {"__half2float", "__bfloat162float", "fmaxf", "fabsf", "fmaf"}
NAMES = {"identifier", "field_identifier", "reference_declarator"}  # declarators whose type is the preceding one
MOST_LINES = 22  # maximum size of a body that is inlined


def source(node, text):
    return text[node.start_byte:node.end_byte]


def edited(text, edits):
    """Applies edits [(start, end, replacement)]. Edits inside another edit are ignored."""
    out, at = [], 0
    for start, end, instead in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
        if start >= at:
            out += [text[at:start], instead]
            at = end
    return "".join([*out, text[at:]])


def comment_above(at, text):
    """The comment that ends at the start of a line, as text."""
    return re.search(r"(?:^ *//(?! ----| ====).*\n)*\Z", text[:at], re.MULTILINE)[0]


def are_apart(edits, others):
    """True if no edit overlaps one of the others."""
    return not any(start < other_end and other_start < end or start == other_start
                   for start, end, *_ in edits for other_start, other_end, *_ in others)


def names_made(node):
    """The names that declarations in a subtree declare."""
    made = {name_of(one) for one in descendants(node, "parameter_declaration", "init_declarator")
            if one.type == "init_declarator" or one.child_by_field_name("declarator")}
    for one in descendants(node, "declaration", "for_range_loop"):
        made |= {name_of(each) for each in one.children_by_field_name("declarator")}
    return made | {each.text.decode() for one in descendants(node, "structured_binding_declarator")
                   for each in one.named_children}


def is_static(node):
    return b"static" in [one.text for one in node.children]


class Inlining:
    """Inlines calls, except of the functions `but`; the result is `out`. None: of all functions."""

    def __init__(self, text, but):
        self.text, self.root = text, parse(text)
        self.fields = collections.defaultdict(set)  # types of members by name; "name[]" for elements of arrays
        for node in descendants(self.root, "field_declaration"):
            for one in node.children_by_field_name("declarator"):
                kind = source(node.child_by_field_name("type"), text)
                self.fields[name_of(one)].add(kind if one.type == "field_identifier" else "")
                self.fields[name_of(one) + "[]"].add(kind if one.type == "array_declarator" else "")
        functions = collections.defaultdict(list)
        for node in descendants(self.root, "function_definition"):
            functions[name_of(node)].append(node)
        self.returns = {name: self.type_text(nodes[0]) for name, nodes in functions.items()
                        if len({self.type_text(node) for node in nodes}) == 1 and nodes[0].child_by_field_name("type")}
        calls, used = collections.defaultdict(list), collections.Counter()
        for call in descendants(self.root, "call_expression"):
            calls[name_of(callee(call))].append(call)
        for one in descendants(self.root, "identifier", "type_identifier"):
            used[one.text.decode()] += one.parent.type not in ("function_declarator", "parameter_declaration")
        self.out = text
        if but is None:
            return
        edits, busy = [], set()
        for name, nodes in functions.items():
            is_method = enclosing(nodes[0].parent, "struct_specifier") is not None
            own = [call for call in calls[name] if not nodes[0].start_byte <= call.start_byte < nodes[0].end_byte]
            others = used[name] - sum(callee(call).type != "field_identifier" for call in own)
            is_called = own and len(own) == len(calls[name]) and (is_method or not others)
            if is_called and len(nodes) == 1 and name not in but:
                edits += self.replaced(nodes[0], own, busy)
        for node in descendants(self.root, "lambda_expression"):
            if node.parent.type != "init_declarator" or node.parent.parent.type != "declaration":
                continue
            scope, name = enclosing(node.parent, "function_definition"), name_of(node.parent)
            own = [call for call in descendants(scope, "call_expression")
                   if source(call.child_by_field_name("function"), text) == name]
            uses = [one for one in descendants(scope, "identifier") if one.text.decode() == name]
            if own and len(uses) == len(own) + 1:
                done = self.replaced(node, own, busy)
                edits += done and [*done, (node.parent.parent.start_byte, node.parent.parent.end_byte, "")]
        self.out = edited(text, edits)

    def kind(self, node):
        """The scalar type of an expression; None if unknown."""
        text, field, kind = source(node, self.text), node.child_by_field_name, node.type
        while node.type == "subscript_expression":  # element of an array of scalars
            node = node.child_by_field_name("argument")
        if kind == "number_literal":
            known = {r"\d+": "int", r"[\d.]+f": "float", r"\d+u": "uint32_t"}
            return next((one for pattern, one in known.items() if re.fullmatch(pattern, text)), None)
        if kind in ("true", "false") or kind == "unary_expression" and text[0] == "!":
            return "bool"
        if re.fullmatch(r"(thread|block)Idx\.\w", text):
            return "uint32_t"
        if kind == "identifier":
            return type_of(text, node, self.text)
        if kind == "subscript_expression" and node.type == "identifier":
            return type_of(source(node, self.text), node, self.text, "array_declarator", "pointer_declarator")
        if node.type in ("qualified_identifier", "field_expression"):
            name = name_of(node.child_by_field_name("field") or node)
            types = self.fields.get(name + "[]" * (kind == "subscript_expression"), ())
            return next(iter(types)) if len(types) == 1 else None
        if kind == "call_expression":
            name = source(field("function"), self.text)
            sides = listed(node, "arguments") if name in ("min", "max") else []
            if not sides:
                return name if name in SCALARS else "float" if name in FLOATS else self.returns.get(name_of(callee(node)))
        elif kind == "binary_expression" and source(field("operator"),
                                                    self.text) in ("<", ">", "<=", ">=", "==", "!=", "&&", "||"):
            return "bool"
        else:
            sides = [one for name in ("left", "right", "consequence", "alternative", "argument")
                     for one in node.children_by_field_name(name)]
            sides = node.named_children if kind == "parenthesized_expression" else sides
        kinds = {self.kind(one) for one in sides}
        return kinds.pop() if len(kinds) == 1 else None

    def bound(self, function, call):
        """({parameter: replacement}, declarations to insert before, names in the arguments) for a call; None if the call cannot
        be inlined."""
        body, given = function.child_by_field_name("body"), listed(call, "arguments")
        parameters = [one for one in listed((descendants(function, "function_declarator",
                                                         "abstract_function_declarator") or [function])[0],
                                            "parameters") if one.type != "comment"]
        if len(given) != len(parameters):
            return None
        written = [source(one.child_by_field_name("left") or one.child_by_field_name("argument"), self.text)
                   for one in descendants(body, "assignment_expression", "update_expression")]
        bound, first, words = {}, [], set()
        for parameter, argument in zip(parameters, given):
            declarator, value = parameter.child_by_field_name("declarator"), source(argument, self.text)
            name = name_of(declarator) if declarator else ""
            whole, own_type = source(parameter, self.text), source(parameter.child_by_field_name("type"), self.text)
            uses = [one for one in descendants(body, "identifier", "type_identifier") if one.text.decode() == name]
            is_plain = argument.type in ("identifier", "number_literal", "true", "false") or (
                re.fullmatch(r"\w+(\.\w+|\[\w+\]|::\w+)*", value) is not None)
            is_reference = "&" in whole
            is_same = own_type not in SCALARS or is_reference or "*" in whole or self.kind(argument) == own_type
            if not uses and is_plain:
                continue
            words |= words_of(value)
            if value == name and is_same and name not in written:
                bound[name] = value
            elif is_reference and "const" not in whole and not is_plain:
                return None
            elif is_same and (is_plain or len(uses) == 1 or is_reference and
                              not descendants(argument, "call_expression")) and (
                    is_reference or name not in written) and (
                    argument.type not in ("initializer_list", "lambda_expression")):
                bound[name] = value if argument.type in ATOMS else f"({value})"
            elif is_plain and not re.search(r"[&*\[]", whole) and name not in written:
                bound[name] = f"{own_type}({value})"
            elif declarator is not None and argument.type != "lambda_expression" and "*" not in whole:
                first.append(f"{'' if name in written or 'const' in whole else 'const '}{whole} = {value};")
            else:
                first.append(f"{whole} = {value};")
        templates = listed(function.parent, "parameters") if function.parent.type == "template_declaration" else []
        arguments = descendants(call.child_by_field_name("function"), "template_argument_list")
        explicit = [source(one, self.text) for one in arguments[0].named_children] if arguments else []
        for n, one in enumerate(templates):
            if n >= len(explicit):
                if name_of(one) in words_of(source(body, self.text) + "".join(first)):
                    return None
                continue
            is_plain = one.type == "type_parameter_declaration" or re.fullmatch(r"[\w:<>]+", explicit[n])
            bound[name_of(one)] = explicit[n] if is_plain else f"({explicit[n]})"
        return bound, first, words

    def rendered(self, part, function, bound, owner):
        """A part of a function's body with its parameters replaced, and members qualified by their object."""
        made = names_made(function)
        struct = self.struct_of(function)
        members, statics = set(), set()
        if struct is not None and owner is not None:
            for one in struct.child_by_field_name("body").named_children:
                of = declared(one)
                statics |= {name_of(each) for each in of.children_by_field_name("type")
                            if each.child_by_field_name("body")}
                names = {name_of(each) for field in ("declarator", "name") for each in of.children_by_field_name(field)}
                (statics if is_static(of) or of.type in ("alias_declaration", "struct_specifier", "enum_specifier")
                 else members).update(names)
        edits = []
        for one in descendants(part, "identifier", "type_identifier", "namespace_identifier"):
            name = one.text.decode()
            if name in bound:
                value = bound[name]
                if value[:1] == "(" and one.parent.type in WHOLE:
                    value = value[1:-1]
                edits.append((one.start_byte, one.end_byte, value))
            elif name in made or one.parent.child_by_field_name("name") == one:
                continue
            elif name in members:
                edits.append((one.start_byte, one.end_byte, f"{owner}.{name}"))
            elif name in statics:
                edits.append((one.start_byte, one.end_byte, f"{name_of(struct)}::{name}"))
        inside = [(start - part.start_byte, end - part.start_byte, to) for start, end, to in edits]
        return edited(source(part, self.text), inside)

    def replaced(self, function, calls, busy):
        """The edits that inline the calls of a function; empty if that is impossible."""
        body, head = function.child_by_field_name("body"), self.head(function)
        code, struct = source(body, self.text) if body else "", self.struct_of(function)
        statements = [one for one in body.named_children if one.type != "comment"] if body else []
        is_odd = re.search(r"__global__|operator|override", head) or descendants(
            function, "field_initializer_list") or re.search(
                r"\basm\b|va_list|thread_local|__shared__|#|\bthis\b", code)
        if not statements or is_odd or struct is not None and (
                struct.parent.type == "template_declaration" or name_of(struct) == name_of(function) or
                any(one.type == "base_class_clause" for one in struct.children)):
            return []
        kinds = [one.type for one in statements]
        is_expression = kinds == ["return_statement"] and statements[0].named_children or kinds == [
            "expression_statement"] and statements[0].named_children[0].type == "call_expression" and len(calls) > 1
        if is_expression:
            value = statements[0].named_children[0]
            text = source(value, self.text)
            if "__device__" in head and self.type_text(function) == "bool" and value.type != "call_expression":
                return []  # nvcc would generate a branch instead of a select, or the reverse
            if len(text) > (40 if struct is not None else 110) or len(calls) > 1 and not re.fullmatch(
                    r"[\w.]+(\([\w., ]*\))?", text):
                return []
            if value.type in ("initializer_list", "lambda_expression"):
                return []
            return self.expressions(function, value, calls)
        if len(calls) > 1 or code.count("\n") > MOST_LINES:
            return []
        return self.statements(function, statements, calls[0], busy)

    def owner(self, call, function):
        """The object of a member call; None if there is none, "" if the call cannot be inlined."""
        target = call.child_by_field_name("function")
        if target.type != "field_expression":
            return None
        value = source(target.child_by_field_name("argument"), self.text)
        return value if re.fullmatch(r"\w+(\.\w+|\[\w+\])*", value) and "->" not in source(target, self.text) else ""

    def expressions(self, function, value, calls):
        edits = []
        own_type = self.type_text(function)
        for call in calls:
            bound, owner = self.bound(function, call), self.owner(call, function)
            if not bound or bound[1] or owner == "":
                return []
            if any(len([one for one in descendants(value, "identifier") if one.text.decode() == name]) > 1 and
                   not re.fullmatch(
                    r"[\w.]+", to) for name, to in bound[0].items()):
                return []
            if names_made(value) & bound[2] or names_made(value) and owner:
                return []
            text = self.rendered(value, function, bound[0], owner)
            is_whole = call.parent.type in WHOLE or value.type in ATOMS or (
                call.parent.type == "assignment_expression" and call.parent.child_by_field_name("right") == call)
            declares_same = call.parent.type == "init_declarator" and own_type in SCALARS
            is_cast = text.startswith(f"{own_type}(")
            if own_type in SCALARS and self.kind(value) != own_type and not declares_same and not is_cast:
                text = f"{own_type}({text})"
            elif not is_whole:
                text = f"({text})"
            edits.append((call.start_byte, call.end_byte, text))
        return edits

    def statements(self, function, statements, call, busy):
        """The edits that replace a statement, which is the only call, by a body of several statements."""
        bound, owner, place = self.bound(function, call), self.owner(call, function), call.parent
        body, outer = function.child_by_field_name("body"), enclosing(call, "function_definition")
        scope = enclosing(call, "function_definition", "lambda_expression")
        if not bound or owner == "" or outer is None or outer.start_byte in busy:
            return []
        bound, first, given = bound
        returns = [one for one in descendants(body, "return_statement")
                   if enclosing(one, "lambda_expression", "function_definition") == function]
        top = {name_of(one) for statement in statements if statement.type == "declaration"
               for one in statement.children_by_field_name("declarator")}
        top |= {re.search(r"(\w+)(\[\w*\])* =", one)[1] for one in first}
        given = given.union(words_of(owner or "")) - {name for name, to in bound.items() if name == to}
        if (top | names_made(body)) & given:
            return []  # a local name of the body would hide an argument
        before = {source(one, self.text) for one in outer.child_by_field_name("body").named_children
                  if one.start_byte < call.start_byte}
        same = [one for one in statements if source(one, self.text) in before and one.type == "declaration"]
        top -= {name_of(each) for one in same for each in one.children_by_field_name("declarator")}
        inside = [(one.start_byte, one.end_byte) for one in (call, function)]
        clashes = any(source(one, self.text) in top and not any(start <= one.start_byte < end for start, end in inside)
                      for one in descendants(outer, "identifier"))
        plain = {name: to for name, to in bound.items() if re.fullmatch(r"\w+", to)}
        said = "".join(f"{line}\n" for line in self.comment_of(function))
        for name in [name for name, to in plain.items() if said and to in ("true", "false")]:
            said = without_sentences(said, rf"[^.;]*`{name}`")
        # A number takes the place of a name, but not of a word of the language.
        instead = {name: to for name, to in plain.items() if not to.isdigit() or not re.fullmatch("[a-z]{2,}", name)}
        lines = [re.sub(r"\b[A-Za-z_]\w*\b", lambda m: instead.get(m[0], m[0]), line) for line in said.splitlines()] + first
        code = textwrap.dedent(self.rendered(body, function, bound, owner)[1:-1].strip("\n").rstrip())
        for one in same:  # already declared by the caller
            code = code.replace(source(one, self.text) + "\n", "", 1)
        in_block = place.parent.type == "compound_statement"
        if place.type == "expression_statement" and place.parent.type in (
                "compound_statement", "if_statement", "else_clause"):
            if returns or not in_block and "__device__" in self.head(function):
                return []  # nvcc would keep other values in registers across a branch
            text = "\n".join([*lines, code])
            text = f"{{\n{text}\n}}" if clashes or not in_block else text
        elif place.type == "return_statement" and in_block:
            if scope.type == "lambda_expression" or clashes or self.type_text(outer) != self.type_text(function):
                return []
            text = "\n".join([*lines, code])
        elif place.type == "init_declarator" and [one.type for one in (place.parent, place.parent.parent)] == [
                "declaration", "compound_statement"]:
            place = place.parent
            is_alone = len(place.children_by_field_name("declarator")) == 1
            if clashes or len(returns) != 1 or returns[0] != statements[-1] or not is_alone:
                return []
            result = self.rendered(returns[0].named_children[0], function, bound, owner)
            text = "\n".join([*lines, code[:code.rindex("return")].rstrip(),
                              edited(self.text, [(call.start_byte, call.end_byte, result),
                                                 (place.end_byte, len(self.text), "")])[
                                  place.start_byte:]])
        else:
            return []
        busy.add(outer.start_byte)
        is_in_line = self.text[self.text.rfind("\n", 0, place.start_byte) + 1:place.start_byte].strip()  # of the function
        return [(place.start_byte, place.end_byte, "\n" * bool(is_in_line) + textwrap.indent(text, " " * place.start_point[1]).lstrip())]

    @staticmethod
    def struct_of(function):
        return enclosing(function.parent, "struct_specifier") if function.type == "function_definition" else None

    def type_text(self, function):
        """The return type of a function, as written."""
        own, declarator = function.child_by_field_name("type"), function.child_by_field_name("declarator")
        stars = re.match(r"[&* ]*", source(declarator, self.text))[0].strip() if declarator else ""
        return own and source(own, self.text) + stars

    def head(self, function):
        """The text before a function's body, from the start of the line."""
        return self.text[self.text.rfind("\n", 0, function.start_byte) + 1:function.end_byte].split("{")[0]

    def comment_of(self, function):
        """The comment above a function."""
        above = self.text[:self.text.rfind("\n", 0, function.start_byte) + 1].split("\n")[-2::-1]
        return [line.strip() for line in itertools.takewhile(re.compile(r" *//(?! ----| ====)").match, above)][::-1]


def type_of(name, node, text, *more):
    """The declared type of a local variable, parameter or member at a node, as written; None if unknown."""
    place = node
    while place is not None:
        for one in descendants(place, "parameter_declaration", "declaration", "field_declaration") if place.type in (
                "function_definition", "lambda_expression", "struct_specifier", "translation_unit") else []:
            plain = {*NAMES, *more}
            kinds = {(each.child_by_field_name("declarator") if each.type == "init_declarator" else each).type
                     for each in one.children_by_field_name("declarator") if name_of(each) == name}
            if kinds & plain and one.child_by_field_name("type"):
                return source(one.child_by_field_name("type"), text)
            if kinds and place.type != "translation_unit" and (one.type == "field_declaration") == (
                    place.type == "struct_specifier"):
                return None  # an array, which hides outer declarations of the name
        place = place.parent
    return None


def type_of_expression(node, text, *more):
    """The type of a name, or of a member if all members of that name have the same type; else None. more: additional
    declarators that count by their element type."""
    if node.type == "identifier":
        return type_of(source(node, text), node, text, *more)
    if node.type != "field_expression" or node.child_by_field_name("field").type != "field_identifier":
        return None
    types = {source(one.child_by_field_name("type"), text) if each.type in {*NAMES, *more} else None
             for one in descendants(parse(text), "field_declaration")
             for each in one.children_by_field_name("declarator")
             if name_of(each) == name_of(node.child_by_field_name("field"))}
    return types.pop() if len(types) == 1 else None


def inlined(text, but):
    return Inlining(text, but).out
