"""Finds the calls of each function of a source text, by scope, receiver type and number of arguments, and removes
functions and parameters that have no effect. Used by tools/concrete.py."""
import bisect
import collections
import functools
import re

from inlining import are_apart, comment_above, edited, source
from minimal import ROOTS, callee, descendants, enclosing, listed, name_of, parse, without_sentences, words_of

# A parameter that gets the same one of these values in all calls is replaced by it.
LITERALS = {"0", "1", "true", "false"}
# Parents of a type's name that make no object of it.
NO_OBJECT = {"template_type", "struct_specifier", "base_class_clause", "alias_declaration", "parameter_declaration",
             "type_descriptor", "qualified_identifier", "dependent_type"}


@functools.lru_cache(None)
def base_name(kind):
    """The name of a type without qualifiers and template arguments."""
    kind = re.sub(r"<.*>|\[.*|\b(?:const|typename|struct)\b|[&*\s]", "", kind, flags=re.DOTALL)
    return kind.rpartition("::")[2]


def declarator_of(function):
    """The function_declarator of a definition."""
    return next(iter(descendants(function, "function_declarator")), None)


class Around:
    """Finds the innermost node of a type around another node."""

    def __init__(self, root, kind):
        self.nodes = descendants(root, kind)
        self.starts, self.outer, around = [one.start_byte for one in self.nodes], [], []
        for n, one in enumerate(self.nodes):
            while around and self.nodes[around[-1]].end_byte <= one.start_byte:
                around.pop()
            self.outer.append(around[-1] if around else -1)
            around.append(n)

    def __call__(self, node):
        n = bisect.bisect_right(self.starts, node.start_byte) - 1
        while n >= 0 and self.nodes[n].end_byte <= node.start_byte:
            n = self.outer[n]
        return self.nodes[n] if n >= 0 else None


class Calls:
    """of: {offset of a function definition: argument lists of its calls}. Functions in `open_names` may have other calls."""

    def __init__(self, text):
        self.text, self.root, self.locals, self.owners = text, parse(text), {}, {}
        self.function_at, self.struct_around = (Around(self.root, kind) for kind in ("function_definition", "struct_specifier"))
        self.structs, self.aliases, self.bases, self.names = {}, {}, collections.defaultdict(list), {}
        for node in descendants(self.root, "struct_specifier"):
            if node.child_by_field_name("body"):
                self.structs[name_of(node)] = None if name_of(node) in self.structs else node
                self.bases[name_of(node)] += [name_of(one) for part in node.children if part.type == "base_class_clause"
                                              for one in part.named_children if name_of(one)]
        for node in descendants(self.root, "alias_declaration"):
            of = enclosing(node, "struct_specifier")
            self.aliases[of and name_of(of), name_of(node)] = source(node.child_by_field_name("type"), text)
        self.parameters_of_templates = {name_of(one) for one in descendants(self.root, "type_parameter_declaration")}
        self.functions = collections.defaultdict(list)  # by owner and name
        for node in descendants(self.root, "function_definition"):
            if node.child_by_field_name("body") and declarator_of(node):
                self.functions[self.owner(node), name_of(node)].append(node)
        self.of, self.open_names = collections.defaultdict(list), {name for name, node in self.structs.items() if not node}
        for call in descendants(self.root, "call_expression"):
            self.add_call(call)
        self.add_constructions()
        self.add_other_uses()

    def owner(self, node):
        """The struct of a member function, also of one that is defined outside of it; None for other functions."""
        declarator = declarator_of(node)
        name = declarator and declarator.child_by_field_name("declarator")
        if name and name.type == "qualified_identifier":
            return name_of(name.child_by_field_name("scope"))
        struct = enclosing(node.parent, "struct_specifier")
        return struct and name_of(struct)

    def resolved(self, kind, struct):
        """The name of the type that a text names in a struct or in the file."""
        if (kind, struct) not in self.names:
            self.names[kind, struct] = self.resolve(kind, struct)
        return self.names[kind, struct]

    def resolve(self, kind, struct):
        """resolved() without its cache."""
        for _ in range(8):
            scope, _, name = re.sub(r"<.*>|\btypename\b", "", kind, flags=re.DOTALL).strip().rpartition("::")
            struct = self.resolved(scope, struct) if scope else struct
            own = next((self.aliases[one, base_name(name)] for one in (*self.family(struct), None)
                        if (one, base_name(name)) in self.aliases), None)
            if own in (None, kind):
                break
            kind = own
        return base_name(kind)

    def family(self, struct):
        """A struct and its bases."""
        out = [struct] if struct else []
        for one in out:
            out += [self.resolved(base, None) for base in self.bases[one] if self.resolved(base, None) not in out]
        return out

    def is_known(self, struct):
        """True if all members of a struct are known: it has one definition, and so have its bases."""
        return all(map(self.structs.get, self.family(struct) or [None]))

    def struct_at(self, node):
        function, struct = self.function_at(node), self.struct_around(node)
        if struct:
            return name_of(struct)
        if function not in self.owners:
            self.owners[function] = function and self.owner(function)
        return self.owners[function]

    def field(self, struct, name):
        """The type of a member."""
        for one in self.family(struct):
            for node in descendants(self.structs.get(one), "field_declaration") if self.structs.get(one) else []:
                if name in [name_of(each) for each in node.children_by_field_name("declarator")]:
                    return self.resolved(source(node.child_by_field_name("type"), self.text), one)
        return None

    def type(self, node):
        """The struct of an expression; None if unknown."""
        struct = self.struct_at(node)
        if node.type == "this":
            return struct
        if node.type in ("parenthesized_expression", "pointer_expression"):
            return self.type(node.named_children[0])
        if node.type == "field_expression":
            owner = self.type(node.child_by_field_name("argument"))
            return owner and self.field(owner, name_of(node.child_by_field_name("field")))
        if node.type == "subscript_expression":
            return self.type(node.child_by_field_name("argument"))
        if node.type != "identifier":
            return None
        own = self.local(source(node, self.text), node)
        if own is None:
            return struct and self.field(struct, source(node, self.text))
        loop = enclosing(node, "for_range_loop")
        if loop and name_of(loop.child_by_field_name("declarator")) == source(node, self.text) and re.fullmatch("(const )?auto", own):
            element = self.type(loop.child_by_field_name("right"))
            return None if element in self.structs else element  # of an array
        kind = self.resolved(own, struct)
        return None if kind in self.parameters_of_templates or re.search(r"\bauto\b|decltype", own) else kind

    def local(self, name, node):
        """The type of a variable or parameter of the function around a node; None if it has none of this name."""
        function = self.function_at(node)
        if function not in self.locals:
            self.locals[function] = {
                name_of(each): source(one.child_by_field_name("type"), self.text)
                for one in descendants(function, "parameter_declaration", "optional_parameter_declaration", "declaration",
                                       "for_range_loop") if one.child_by_field_name("type")
                for each in one.children_by_field_name("declarator")} if function else {}
        return self.locals[function].get(name)

    def add(self, owner, name, arguments):
        """Records a call of a function of one of these owners."""
        own = next((self.functions[one, name] for one in owner if (one, name) in self.functions), [])
        fits = [node for node in own if self.least(node) <= len(arguments) <= len(self.parameters(node))]
        if len(fits) > 1:  # overloads that differ in the type of an argument
            fits = [node for node in fits if all(map(self.may_take, self.parameters(node), arguments))]
        if len(fits) == 1:
            self.of[fits[0].start_byte].append(arguments)
        else:
            self.open_names.add(name)

    def may_take(self, parameter, argument):
        """False if the types of a parameter and an argument are known and differ."""
        templates = enclosing(parameter, "template_declaration")
        own = self.resolved(source(parameter.child_by_field_name("type"), self.text), None)
        is_open = templates and own in words_of(source(templates.child_by_field_name("parameters"), self.text))
        return is_open or self.type(argument) in (None, own)

    def parameters(self, node):
        return [one for one in listed(declarator_of(node), "parameters") if one.type != "comment"]

    def least(self, node):
        return sum(not one.child_by_field_name("default_value") for one in self.parameters(node))

    def add_call(self, call):
        function, arguments = call.child_by_field_name("function"), listed(call, "arguments")
        name = re.search(r"(\w+)\s*(?:<[^()]*>)?$", source(function, self.text))
        name, struct = name[1] if name else "", self.struct_at(call)
        arguments = [one for one in arguments if one.type != "comment"]
        if function.type == "identifier" and self.local(name, call):
            return  # a variable
        if function.type == "field_expression":
            of = self.type(function.child_by_field_name("argument"))
            self.add(self.family(of), name, arguments)
        elif function.type == "qualified_identifier":
            of = self.resolved(source(function.child_by_field_name("scope"), self.text), struct)
            self.add(self.family(of), name, arguments)
        else:
            made = self.resolved(name, struct)
            is_made = made in self.structs  # a constructor
            self.add([made] * is_made + [*self.family(struct), None], made if is_made else name, arguments)

    def add_constructions(self):
        """Records the calls of constructors."""
        for node in descendants(self.root, "type_identifier", "template_type"):
            parent = node.parent
            struct = None if parent.type in NO_OBJECT else self.resolved(source(node, self.text), self.struct_at(node))
            if not self.structs.get(struct) or (struct, struct) not in self.functions:
                continue
            declarators = parent.children_by_field_name("declarator")
            value = parent.type == "declaration" and len(declarators) == 1 and (
                declarators[0].child_by_field_name("value") or declarators[0].child_by_field_name("parameters"))
            if value and value.type in ("argument_list", "initializer_list", "parameter_list"):
                self.add([struct], struct, value.named_children)
            elif parent.type != "field_declaration":  # members have initializers
                self.open_names.add(struct)
        for node in descendants(self.root, "field_initializer"):
            struct, name = self.struct_at(node), name_of(node)
            kind = self.resolved(name, struct) if name in self.bases[struct] or name == "Base" else self.field(struct, name)
            value = next((one for one in node.named_children if one.type in ("argument_list", "initializer_list")), None)
            if kind in self.structs and (kind, kind) in self.functions and value is not None:
                given = value.named_children
                if len(given) > 1 or self.least(self.functions[kind, kind][0]) == len(given):
                    self.add([kind], kind, given)

    def add_other_uses(self):
        """Finds functions that are named without a call."""
        names = {name for _, name in self.functions}
        for node in descendants(self.root, "identifier"):
            name, parent = source(node, self.text), node.parent
            while parent.type in ("template_function", "qualified_identifier"):
                node, parent = parent, parent.parent
            if name in names and not (parent.type == "call_expression" and parent.child_by_field_name("function") == node) and (
                    parent.type not in ("function_declarator", "using_declaration", "field_initializer")):
                if name in self.structs or not self.local(name, node):
                    self.open_names.add(name)

    def known(self, but):
        """(owner, name, definition, argument lists) of the functions whose calls are all known, also of those without a call."""
        declared_only = {name_of(one) for one in descendants(self.root, "field_declaration", "declaration")
                         for one in one.children_by_field_name("declarator") if one.type == "function_declarator" and
                         enclosing(one, "compound_statement") is None}
        for (owner, name), nodes in self.functions.items():
            for node in nodes:
                head = self.text[self.text.rfind("\n", 0, node.start_byte) + 1:node.end_byte].split("{")[0]
                above = self.text[max(0, node.start_byte - 80):node.start_byte]
                if name and name not in self.open_names | but | ROOTS | declared_only and not re.search(
                        r"\boperator\b|\boverride\b", head) and "__global__" not in above.rpartition("}")[2] + head:
                    yield owner, name, node, self.of.get(node.start_byte, [])


def without_idle_functions(text, but):
    """Removes member functions without a call, and functions with an empty body with their calls."""
    calls, edits = Calls(text), []
    inherited = {one for bases in calls.bases.values() for one in bases}
    for owner, name, node, given in calls.known(set()):
        body = node.child_by_field_name("body")
        places = [arguments and arguments[0].parent.parent for arguments in given]
        is_constructor = owner == name
        is_overload = any(one.start_byte in calls.of for one in calls.functions[owner, name]) or not owner and any(
            of and one == name for of, one in calls.functions)
        is_unused = not given and (is_overload and name not in inherited if is_constructor else owner or is_overload)
        is_idle = given and not is_constructor and name not in but and not body.named_children
        if not is_unused and not is_idle or not all(
                place and place.type == "call_expression" and place.parent.type == "expression_statement" for place in places):
            continue
        whole = node.parent if node.parent.type == "template_declaration" else node
        start = text.rfind("\n", 0, whole.start_byte) + 1
        above = comment_above(start, text)
        lines = [(text.rfind("\n", 0, place.start_byte) + 1, text.index("\n", place.end_byte) + 1) for place in places]
        edits.append((start - len(above), text.index("\n", whole.end_byte) + 1, ""))
        for place, (first, last) in zip(places, lines):
            alone = re.fullmatch(r"\s*", text[first:place.start_byte]) and re.fullmatch(r";\s*(//.*)?\n", text[place.end_byte:last])
            edits.append((first, last, "") if alone else (place.start_byte, place.end_byte + 1, ""))
    return edited(text, edits)


def line_of(node, text):
    """The extent of a node with its lines and its trailing comment."""
    start = text.rfind("\n", 0, node.start_byte) + 1
    end = text.index("\n", node.end_byte)
    before = text[start:node.start_byte]
    alone = re.fullmatch(r"\s*(?:__\w+__\s*)*", before) and re.fullmatch(r"\s*(//.*)?", text[node.end_byte:end])
    return (start, end + 1, "") if alone else (node.start_byte, node.end_byte, "")


def without_one(nodes, n):
    """The extent of element n of a list, with its comma."""
    if n + 1 < len(nodes):
        return nodes[n].start_byte, nodes[n + 1].start_byte
    return (nodes[n - 1].end_byte if n else nodes[n].start_byte), nodes[n].end_byte


def without_needless_parameters(text, but):
    """Removes parameters that the function does not read, or that have the same literal in all calls: at most one of each
    function."""
    calls, all_edits = Calls(text), []
    for owner, name, node, given in calls.known(but):
        if not given:
            continue
        parameters = calls.parameters(node)
        others = [one for one in calls.functions[owner, name] if one != node]
        templates = words_of(source(node.parent.child_by_field_name("parameters"), text)) if (
            node.parent.type == "template_declaration") else set()
        inside = text[declarator_of(node).end_byte:node.end_byte]
        for n, parameter in enumerate(parameters):
            declarator, default = parameter.child_by_field_name("declarator"), parameter.child_by_field_name("default_value")
            own = name_of(declarator) if declarator else ""
            if default and all(n < len(one) for one in given):  # a default that no call uses
                place = [(len(text[:default.start_byte].rstrip("= ")), default.end_byte, "")]
                all_edits += place if are_apart(all_edits, place) else []
                break
            deduced_by = templates & words_of(source(parameter, text))
            if deduced_by - {"B"} or deduced_by and not all(one and "<B" in source(one[0].parent.parent, text)[
                    :one[0].parent.start_byte - one[0].parent.parent.start_byte] for one in given) or (
                        owner == name and len(parameters) == 1):
                continue
            values = {source(one[n], text) if n < len(one) else source(default, text) for one in given}
            is_read = own in words_of(re.sub("//.*", "", inside))
            is_scalar = source(parameter.child_by_field_name("type"), text) in ("int", "bool") and "&" not in source(parameter, text)
            writes = [one for one in descendants(node, "assignment_expression", "update_expression")
                      if own == source(one.child_by_field_name("left") or one.child_by_field_name("argument"), text)]
            is_literal = len(values) == 1 and values <= LITERALS and is_scalar and not writes
            made = [one for one in descendants(node.child_by_field_name("body"), "init_declarator", "parameter_declaration")
                    if name_of(one) == own]
            if is_read and (not is_literal or made):
                continue
            rest = [source(one, text) for one in parameters if one != parameter]
            same = [one for one in others if calls.least(one) <= len(rest) <= len(calls.parameters(one))]
            if same and (is_read or rest != [source(one, text) for one in calls.parameters(same[0])] or
                         re.sub(r"\s", "", inside) != re.sub(r"\s", "", text[declarator_of(same[0]).end_byte:same[0].end_byte])):
                continue  # the two would be ambiguous
            at = text.rfind("\n", 0, node.start_byte) + 1
            above = comment_above(at, text)
            edits = [line_of(node, text)] * bool(same) + [(*without_one(one, n), "") for one in [parameters, *(each for each in given if n < len(each))]]
            if is_read:
                value = next(iter(values))
                edits += [(one.start_byte, one.end_byte, value) for one in descendants(node, "identifier")
                          if source(one, text) == own and not parameter.start_byte <= one.start_byte < parameter.end_byte]
                is_word = re.fullmatch("[a-z]{2,}", own)  # of the language, too
                edits.append((at - len(above), at, re.sub(rf"`{own}`" + rf"|\b{own}\b" * (not is_word), value, above)))
            elif own and above:
                edits.append((at - len(above), at, without_sentences(above, rf"`?{own}`?[:,] ")))
            if are_apart(all_edits, edits):
                all_edits += edits
                break
    return edited(text, all_edits)


def without_unread_fields(text):
    """Removes members that no code reads or writes, with their initializers, where all accesses to the name are resolved: of each
    struct one data member, and all static ones."""
    calls, all_edits = Calls(text), []
    used, open_names = set(), set()
    members = {name_of(one) for node in descendants(calls.root, "field_declaration")
               for one in node.children_by_field_name("declarator")}
    for node in descendants(calls.root, "field_expression"):
        name, owner = name_of(node.child_by_field_name("field")), calls.type(node.child_by_field_name("argument"))
        used |= {(one, name) for one in calls.family(owner)}
        open_names |= set() if calls.is_known(owner) else {name}
    for node in descendants(calls.root, "identifier", "type_identifier"):
        name = source(node, text)
        struct = name in members and calls.struct_at(node)
        if struct and not calls.local(name, node):
            used |= {(one, name) for one in calls.family(struct)}
    for node in descendants(calls.root, "qualified_identifier"):
        open_names.add(name_of(node.child_by_field_name("name")))
    for struct, node in calls.structs.items():
        fields, static = data_members(node) if node and name_of(node) else ([], [])
        all_edits += [line_of(one, text) for one in static if not any(
            (struct, name_of(each)) in used or name_of(each) in open_names for each in one.children_by_field_name("declarator"))]
        if not fields:
            continue
        names = [(name, field) for name, _, field in fields]
        made = {name_of(one) for one in descendants(node, "field_initializer")}
        unread = next(((n, *one) for n, one in enumerate(names)
                       if one[0] and (struct, one[0]) not in used and one[0] not in open_names | made), None)
        lists = positional(struct, calls, text) if unread else None
        if lists is None or any(len(one) > len(names) for one in lists):
            continue
        n, name, field = unread
        whole = [name_of(one) for one in field.children_by_field_name("declarator")]
        declarators = [one for one in field.children if one.type in (
            "field_identifier", "array_declarator", "reference_declarator", "pointer_declarator")]
        edits = [(*without_one(one, n), "") for one in lists if n < len(one)]
        edits.append(line_of(field, text) if len(whole) == 1 else (*without_one(declarators, whole.index(name)), ""))
        all_edits += edits if are_apart(all_edits, edits) else []
    return edited(text, all_edits)


def data_members(struct):
    """([(name, declarator, declaration)] of the members that each object has, the declarations of static ones)."""
    own = [one for one in struct.child_by_field_name("body").named_children
           if one.type == "field_declaration" and not descendants(one, "function_declarator")]
    static = [one for one in own if b"static" in [each.text for each in one.children]]
    return [(name_of(each), each, one) for one in own if one not in static for each in one.children_by_field_name("declarator")], static


def takers_of(text):
    """The names of the functions and lambdas that may change an argument."""
    return {*re.findall(r"\b(\w+)(?: = \[[^]]*\])?\([^()]*(?<!const )\b(?:int|bool|float|auto|T)& ", text)}


def may_write(use, takers):
    """True if a use of a variable or member may change it: it is assigned to, referenced, or passed to a taker."""
    parent = use.parent
    call = parent.parent if parent.type == "argument_list" else None
    return (parent.type in ("update_expression", "pointer_expression", "lambda_capture_specifier", "initializer_list") or
            parent.type == "assignment_expression" and parent.child_by_field_name("left") == use or
            call is not None and name_of(callee(call)) in takers)


def positional(struct, calls, text):
    """The lists that initialize objects of a struct by position; None if there may be others."""
    if re.search(rf"\b{struct}\b[^;{{]*\)\s*(?:const )?\{{\s*return \{{|\b{struct}\{{", text):
        return None
    found = []
    for other in calls.structs.values():
        for field in descendants(other, "field_declaration") if other else []:
            kind = field.child_by_field_name("type")
            if kind and calls.resolved(source(kind, text), name_of(other)) == struct and re.search(
                    rf"\b{name_of(other)}(?: \w+)?\{{[^}}]|\b{name_of(field)}\{{[^}}]", text):
                return None  # nested braces
    for node in descendants(calls.root, "declaration"):
        kind = node.child_by_field_name("type")
        if kind and calls.resolved(source(kind, text), calls.struct_at(node)) == struct:
            for one in node.children_by_field_name("declarator"):
                value = one.child_by_field_name("value")
                if value is not None and value.type == "initializer_list":
                    found.append(value.named_children)
                elif value is not None and value.type == "argument_list":
                    return None
    return found
