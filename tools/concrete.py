"""Makes an extract look hand-written: removes the template parameter B of a single build, redundant names, and unused
parameters, results and members; inlines calls; moves definitions before their uses. Used by tools/extract.py after
tools/minimal.py."""
import collections
import itertools
import re
import textwrap

from calls import (Around, line_of, may_write, takers_of, without_idle_functions, without_needless_parameters, without_one,
                   without_unread_fields)
from comments import code_of
from inlining import are_apart, comment_above, edited, inlined, source, type_of, type_of_expression
from minimal import (BANNERS, CALLS, ROOTS, WIDTH, Folding, aliases_of, callee, declared, descendants, enclosing, listed, minimal,
                     name_of, parse, units_of, without_sentences, words_of)
from values import with_single_values, without_bundles, without_conditions_of_loops, without_needless_blocks, without_same_casts

PUBLIC = {"Causal", "Strides", "Descale", "SdpaParams", "SdpaStatus"}


def until_stable(change, text):
    before = None
    while text != before:
        before, text = text, change(text)
    return text


# ---- the template parameter B ----

def is_selector(parameter, text):
    """True if a parameter of a struct template only selects a specialization."""
    is_of_struct = declared(parameter.parent.parent).type == "struct_specifier"
    return is_of_struct and re.match(r"(bool|KernelKind)( [A-Z]+)? =", source(parameter, text))


def owner_of(function):
    """The template of a member function that is defined outside of it; None for other functions."""
    declarator = function.child_by_field_name("declarator")
    while declarator is not None and declarator.type != "function_declarator":
        declarator = declarator.child_by_field_name("declarator") or next(
            (one for one in declarator.children if one.type.endswith("declarator")), None)
    name = declarator and declarator.child_by_field_name("declarator")
    return name_of(name.child_by_field_name("scope")) if name and name.type == "qualified_identifier" else None


def versions(root, text):
    """Facts about the templates on B: {name: parameters other than B and selectors}, {name: number of all parameters},
    {name: member functions defined outside}, and the specializations that the build does not select."""
    kept, all_of, outside, gone, primary, folding = {}, {}, collections.defaultdict(list), [], {}, Folding(text, set())
    for node in descendants(root, "template_declaration"):
        inner, parameters = declared(node), [one for one in node.child_by_field_name("parameters").named_children]
        if not parameters or source(parameters[0], text) != "class B":
            continue
        name, own = name_of(inner), inner.child_by_field_name("name")
        if own is not None and own.type == "template_type":  # a specialisation
            value = re.search(r"(true|false)>$", source(own, text))
            if value and name in primary:
                gone.append(primary[name][0] if value[1] == primary[name][1] else node)
        elif inner.type == "function_definition" and owner_of(inner):
            outside[owner_of(inner)].append(node)
        else:
            all_of.setdefault(name, len(parameters))
            kept.setdefault(name, [one for one in parameters[1:] if not is_selector(one, text)])
            if is_selector(parameters[-1], text):
                chosen = folding.value(parameters[-1].child_by_field_name("default_value"))
                primary.setdefault(name, (node, "true" if chosen else "false"))
    for name in [name for name, (node, _) in primary.items() if node in gone]:
        gone += outside.pop(name, [])
    return kept, all_of, outside, gone


def without_build(text):
    """Removes the template parameter B and expands the members of KernelOf. Returns the text and the constants of B."""
    root = parse(text)
    members, edits, kernel = {}, [], {}
    for node in descendants(root, "template_declaration"):
        inner, name = declared(node), name_of(declared(node))
        if inner.type != "struct_specifier" or name not in ("Knobs", "BuildOf", "KernelOf"):
            continue
        for field in descendants(node, "field_declaration") * (name != "KernelOf"):
            members.update((member, re.sub(r"\bK::", "", value).strip()) for member, value in re.findall(
                r"(\w+) =\s+([^;,]*\([^;]*\)|[^;,]+)(?=[;,])", source(field, text)))
        kernel.update(re.findall(r"(?:using|constexpr auto) (\w+) = ([^;]+);", source(inner, text))
                      if name == "KernelOf" else [])
        edits.append((node.start_byte, node.end_byte + 1, ""))
    kept, all_of, outside, gone = versions(root, text)
    edits += [(node.start_byte, node.end_byte + 1, "") for node in gone]
    replaced = {name_of(declared(node)) for node in gone
                if declared(node).type == "struct_specifier" and declared(node).child_by_field_name("name").type != "template_type"}
    text = edited(text, edits)

    def without_arguments(text):
        edits = []
        for node in descendants(parse(text), "template_argument_list"):
            given = [source(one, text) for one in node.named_children]
            if not given or given[0] not in ("B", "Defines") or any("<B" in one for one in given):
                continue
            name = re.search(r"\w+$", text[:node.start_byte])[0]
            rest = given[1:len(given) - (len(given) == all_of.get(name, 0) and len(kept[name]) < all_of[name] - 1)]
            rest = [one for one in rest if not (name in outside and one.isupper() and one.isalpha())]
            has_defaults = kept.get(name) and all(one.child_by_field_name("default_value") for one in kept[name])
            is_call = text[node.end_byte:node.end_byte + 1] == "("
            edits.append((node.start_byte, node.end_byte, f"<{', '.join(rest)}>" if rest or has_defaults and not is_call
                          else ""))
        return edited(text, edits)
    text = until_stable(without_arguments, text)
    text = re.sub(r"(__launch_bounds__\([^()]*)<B>", r"\1", text)  # parse() masks launch bounds
    for name in replaced:  # a specialization becomes the template
        text = re.sub(rf"(\bstruct {name})<[A-Z, ]+>(?= [:{{])", r"\1", text)
    edits = []
    for node in descendants(parse(text), "template_parameter_list"):
        parameters, owner = node.named_children, node.parent
        if not parameters or source(parameters[0], text) != "class B":
            continue
        rest = [source(one, text) for one in parameters[1:] if not is_selector(one, text)]
        rest = [one for one in rest if not re.fullmatch(r"bool [A-Z]+", one) or not re.search(
            rf"^[^(]*\b(?:{'|'.join(outside) or '-'})::", text[node.end_byte:owner.end_byte])]
        after = node.end_byte + len(re.match(r"\s*", text[node.end_byte:])[0])
        edits.append((node.start_byte, node.end_byte, f"<{', '.join(rest)}>") if rest
                     else (owner.start_byte, after, ""))
    text = edited(text, edits)
    kernel = {name: re.sub(r"<B(?:, )?(.*)>", lambda m: f"<{m[1]}>" * bool(m[1]), value) for name,
              value in kernel.items()}
    text = re.sub(r"^ *using Kernel = KernelOf;\n|^ *template <KernelKind = .*> struct KernelOf;\n|^ *struct KernelOf;\n",
                  "", text,
                  flags=re.MULTILINE)
    text = re.sub(r"(?:typename )?\bKernel(?:Of)?::(\w+)", lambda m: kernel[m[1]], text)
    text = re.sub(r"^using Defines = .*\n|^template <class Use> auto with_build(?:.*}|(?:.*\n)*?})\n", "", text,
                  flags=re.MULTILINE)
    text = re.sub(r"with_build\(p, \[&\]\(auto build\) \{ return (\w+)<decltype\(build\)>\((.*?)\); \}\)", r"\1(\2)",
                  text)
    return named_constants(text, members)


def named_constants(text, members):
    """Replaces B::x by the constant X, or by its value if it is true, false or an enumerator. Returns the text and the
    declarations of the constants."""
    last = {}
    for name, value in members.items():
        last[name] = name.upper()
        while value in members:
            last[name], value = value.upper(), members[value]
        if value in ("true", "false") or "::" in value:
            last[name] = value
    text = re.sub(r"\b(?:B|Defines)::(\w+)", lambda m: last.get(m[1], m[0]), text)
    own = {last[name]: re.sub(r"\b[a-z_]+\b", lambda m: last.get(m[0], m[0]), value)
           for name, value in members.items() if last[name] == name.upper()}
    need = words_of(code_of(text)) & own.keys()
    for name, value in reversed(own.items()):
        need |= words_of(value) & own.keys() if name in need else set()
    numbers = [f"{name} = {value}" for name, value in own.items() if name in need and value.isdigit()]
    others = [f"{name} = {value}" for name, value in own.items() if name in need and not value.isdigit()]
    return text, "".join(f"constexpr int {', '.join(part)};\n" for part in (numbers, others) if part)


# ---- parameters with a single value ----

def template_uses(root, text):
    """{name: [(node of the argument list or of the name, arguments)]} for all uses of a template."""
    found = collections.defaultdict(list)
    for node in descendants(root, "template_type", "template_function", "template_method"):
        arguments = node.child_by_field_name("arguments")
        found[name_of(node)].append((arguments, [source(one, text) for one in arguments.named_children]))
    return found


def without_template_parameters(text, but):
    """Removes template parameters for which all uses have the same argument, explicit or deduced: at most one of each
    template."""
    root, all_edits, changed, inserted = parse(text), [], set(), set()
    defined = collections.defaultdict(list)
    for node in descendants(root, "template_declaration"):
        defined[name_of(declared(node))].append(node)
    plain = {name_of(node) for node in descendants(root, "function_definition")
             if node.parent.type != "template_declaration"}
    uses = template_uses(root, text)
    calls, structs = collections.defaultdict(list), collections.defaultdict(list)
    for one in descendants(root, "struct_specifier"):
        structs[name_of(one)].append(one)
    for call in descendants(root, "call_expression"):
        calls[name_of(callee(call))].append(call)
    inner = {name_of(one) for one in descendants(root, "type_parameter_declaration",
                                                 "optional_type_parameter_declaration")}
    inner |= {name_of(one) for node in descendants(root, "template_parameter_list")
              for one in descendants(node, "parameter_declaration", "optional_parameter_declaration")}
    inner |= {name_of(one) for node in descendants(root, "field_declaration") if b"static" in [each.text for each in node.children]
              for one in node.children_by_field_name("declarator")}  # may hide a constant of the file
    top = {name for unit in units_of(root, text.split("\n"))
           for name in unit.names} | {"true", "false", "float", "uint32_t", "float4"}
    for name, nodes in defined.items():
        if all(listed(one, "parameters") for one in nodes):  # without forward declarations
            nodes = [one for one in nodes
                     if declared(one).child_by_field_name("body") or "=" in source(one, text)] or nodes
        parameters = nodes[0].child_by_field_name("parameters").named_children
        node, is_function = nodes[0], declared(nodes[0]).type == "function_definition"
        if len(nodes) != 1 or name in but or not parameters:
            continue
        for n, parameter in enumerate(parameters):
            default = parameter.child_by_field_name("default_value") or parameter.child_by_field_name("default_type")
            given, is_shared = set(), is_function and name in plain  # overloads that are not templates
            if is_shared and (default or name_of(parameter) in words_of("".join(
                    source(one, text) for one in descendants(declared(node), "parameter_list")[:1]))):
                continue
            for _, arguments in uses[name]:
                given.add(arguments[n].removeprefix("typename ") if n < len(arguments) else
                          default and source(default, text))
            if is_function and not is_shared:
                for call in calls[name]:
                    if not descendants(call.child_by_field_name("function"), "template_argument_list"):
                        given.add(deduced(node, parameter, call, text) or default and source(default, text))
            value = next(iter(given)) if len(given) == 1 else None
            users = [one for word in words_of(value or "") for one in structs[word]]
            owner = enclosing(node, "struct_specifier")
            if any({name, owner and name_of(owner)} & words_of(source(one, text)) for one in users):
                continue  # circular dependency
            words = words_of(re.sub(r"::\w+", "", value or ""))
            if not words or {word for word in words if not word.isdigit()} - top or words & inner:
                continue
            body = declared(node)
            if any(name_of(one) == name_of(parameter)
                   for one in descendants(body, "parameter_declaration", "init_declarator", "alias_declaration")):
                continue
            is_plain = "type_parameter" in parameter.type or re.fullmatch(r"[\w:<>, ]+", value)
            own_value = value if is_plain else f"({value})"

            def instead(part, own_value=own_value):
                return [(one.start_byte, one.end_byte, own_value)
                        for one in descendants(part, "identifier", "type_identifier", "namespace_identifier")
                        if source(one, text) == name_of(parameter)]
            rest = [edited(text, instead(one) + [(one.end_byte, len(text), "")])[one.start_byte:]
                    for one in parameters if one != parameter]
            forward = [one for one in defined[name] if one != node]
            is_outside = is_function and owner_of(body)  # of a struct, which has its declaration
            edits = [] if is_outside else [line_of(one, text) for one in forward]
            for one in [node, *forward * bool(is_outside)]:
                lists = one.child_by_field_name("parameters")
                after = lists.end_byte + len(re.match(r"\s*", text[lists.end_byte:])[0])
                edits += instead(declared(one))
                edits.append((lists.start_byte, lists.end_byte, f"<{', '.join(rest)}>") if rest else (one.start_byte, after, ""))
            for where, arguments in uses[name]:
                kept = arguments[:n] + arguments[n + 1:]
                if where and (n < len(arguments) or not rest):
                    edits.append((where.start_byte, where.end_byte, f"<{', '.join(kept)}>" if kept or rest and
                                  not is_function else ""))
            # The arguments of a template that loses a parameter are not copied at the same time.
            if are_apart(all_edits, edits) and not words & changed and name not in inserted:
                all_edits += edits
                changed.add(name)
                inserted |= words
                break
    return edited(text, all_edits)


def deduced(node, parameter, call, text):
    """The template argument that a call deduces from the type of an argument or from the bound of an array."""
    function = next(iter(descendants(declared(node), "function_declarator")))
    for one, argument in zip(listed(function, "parameters"), listed(call, "arguments")):
        of, whole = one.child_by_field_name("type"), source(one, text)
        while argument.type == "binary_expression" and "*" in whole:  # an address and an offset
            argument = argument.child_by_field_name("left")
        if of and source(of, text) == name_of(parameter):
            more = {"*": ("pointer_declarator", "array_declarator"), "[": ("array_declarator",)}
            return type_of_expression(argument, text, *more.get(next(iter(re.findall(r"[*[]", whole)), ""), ()))
        if re.search(rf"\(&\w*\)\[{name_of(parameter)}\]$", whole) and argument.type == "identifier":
            return bound_of(source(argument, text), argument, text)
    return None


def bound_of(name, node, text):
    """The bound of a one-dimensional array, by its name; None if unknown."""
    function = enclosing(node, "function_definition")
    found = {source(one.child_by_field_name("size"), text) for one in descendants(function, "array_declarator")
             if name_of(one) == name and one.child_by_field_name("size") and one.parent.type != "array_declarator" and (
                 one.child_by_field_name("declarator").type != "array_declarator")}
    return found.pop() if len(found) == 1 and not found & {""} else None


def name_of_function(node):
    """The name of a function, or of the variable that a lambda initializes."""
    return name_of(node.parent if node.type == "lambda_expression" and node.parent.type == "init_declarator" else node)


def without_unread_parameters(text, but):
    """Removes unused parameters of functions and lambdas that have one definition of their name, and the arguments. Unused
    parameters of other host functions lose their names, which avoids warnings. but: functions to keep."""
    root, edits, names = parse(text), [], collections.Counter(re.findall(r"\w+", re.sub(r"//.*", "", text)))
    functions = descendants(root, "function_definition", "lambda_expression")
    made = collections.Counter(map(name_of_function, functions))
    structs, calls = {name_of(node) for node in descendants(root, "struct_specifier")}, collections.defaultdict(list)
    for call in descendants(root, "call_expression"):
        calls[name_of(callee(call))].append(listed(call, "arguments"))
    for node in functions:
        name, body = name_of_function(node), node.child_by_field_name("body")
        declarators = descendants(node, "function_declarator", "abstract_function_declarator")
        outer = enclosing(node, "function_definition") or node
        head = text[text.rfind("\n", 0, outer.start_byte) + 1:outer.end_byte].split("{")[0]
        before = text[outer.start_byte - 60:outer.end_byte].split("{")[0]
        is_kernel = node.type == "function_definition" and "__global__" in before
        if not body or not declarators or name in but or is_kernel:
            continue
        parameters = listed(declarators[0], "parameters")
        code = re.sub("//.*", "", text[declarators[0].end_byte:node.end_byte])
        deduced_by = words_of(source(node.parent.child_by_field_name("parameters"), text)) if (
            node.parent.type == "template_declaration") else set()
        is_known = made[name] == 1 and name not in structs | ROOTS and len(calls[name]) + 1 == names[name] and all(
            len(given) == len(parameters) for given in calls[name])
        for n, parameter in enumerate(parameters):
            declarator = parameter.child_by_field_name("declarator")
            identifier = next(iter(descendants(declarator, "identifier")), None) if declarator else None
            if parameter.type == "comment" or identifier and source(identifier, text) in words_of(code):
                continue
            if is_known and not deduced_by & words_of(source(parameter, text)):
                places = [(*without_one(nodes, n), "") for nodes in (*calls[name], parameters)]
                top = node.parent if node.parent.type == "template_declaration" else node
                at = text.rfind("\n", 0, top.start_byte) + 1
                if identifier and node.type == "function_definition" and (above := comment_above(at, text)):
                    places.append((at - len(above), at, without_sentences(above, rf"`?{source(identifier, text)}`?[:,] ")))
                edits += places if are_apart(edits, places) else []
                break
            if identifier and ("__device__" not in head or "__host__" in head):
                space = len(text[:identifier.start_byte]) - len(text[:identifier.start_byte].rstrip(" "))
                edits.append((identifier.start_byte - space, identifier.end_byte, ""))
    return edited(text, edits)


def without_unused_results(text, but):
    """Removes bool results that no call uses, with the sentences of comments about them, and bools that are only written."""
    root, calls = parse(text), collections.defaultdict(list)
    for call in descendants(root, "call_expression"):
        calls[name_of(callee(call))].append(call)
    for node in descendants(root, "function_definition"):
        body, kind, name = node.child_by_field_name("body"), node.child_by_field_name("type"), name_of(node)
        returns = [one for one in descendants(body or node, "return_statement")
                   if enclosing(one, "lambda_expression", "function_definition") == node]
        if kind and source(kind, text) == "bool" and calls[name] and name not in but | ROOTS and len(
                returns) == 1 and returns[0] == body.named_children[-1] and all(
                    call.parent.type == "expression_statement" for call in calls[name]):
            top = node.parent if node.parent.type == "template_declaration" else node
            at = text.rfind("\n", 0, top.start_byte) + 1
            above = comment_above(at, text)
            said = re.split(r"(?<=[.;])\s+", " ".join(line.strip()[3:] for line in above.splitlines()))
            kept = textwrap.wrap(" ".join(one for one in said if not re.match("Returns |True if ", one)), WIDTH - 3)
            return edited(text, [(at - len(above), at, "".join(f"// {line}\n" for line in kept)),
                                 (kind.start_byte, kind.end_byte, "void"), line_of(returns[0], text)])
        for one in descendants(body or node, "init_declarator"):
            value, declaration = one.child_by_field_name("value"), one.parent
            uses = [use for use in descendants(body or node, "identifier")
                    if source(use, text) == name_of(one) and use.parent != one]
            writes = [use.parent for use in uses if use.parent.type == "assignment_expression" and
                      source(use.parent, text).startswith(name_of(one) + " = ")]
            if not re.match("(const )?bool ", source(declaration, text)) or len(uses) > len(writes):
                continue
            if not uses and value.type == "call_expression":
                only_reads = re.search(rf"\b{name_of(callee(value))}\([^()]*\) const {{", text)
                return edited(text, [line_of(declaration, text) if only_reads else (
                    declaration.start_byte, value.start_byte, "")])
            if uses and value.type in ("true", "false"):
                whole = [write.parent.parent if write.parent.parent.type == "if_statement" else None for write in writes]
                place = line_of(declaration, text) if declaration.parent.type != "for_statement" else (
                    declaration.start_byte, declaration.end_byte, ";")
                return edited(text, [place, *(line_of(branch, text) if branch else place_of(
                    write, text) for branch, write in zip(whole, writes))])
    return text


# ---- redundant names ----

def without_other_versions(text, but):
    """Replaces a template with specializations by the one that all uses select."""
    known = aliases_of(text)
    root, defined, lists = parse(text), collections.defaultdict(list), collections.defaultdict(list)
    for node in descendants(root, "template_declaration"):
        defined[name_of(declared(node))].append(node)
    for node in descendants(root, "template_argument_list"):
        lists[name_of(node.parent)].append(node)
    words = collections.Counter(re.findall(r"\w+", re.sub(r"//.*", "", text)))
    for name, (first, *others) in defined.items():
        defaults = [one.child_by_field_name("default_value") for one in listed(first, "parameters")]
        if not others or not defaults or name in but or any(listed(one, "parameters") for one in others):
            continue

        def given(node):
            own = [known.get(source(one, text), source(one, text)) for one in listed(node, "arguments")]
            return tuple(own + [source(one, text) for one in defaults[len(own):] if one])
        # The node with the arguments of a specialization; without such a node, the arguments themselves.
        places = [next((each for each in lists[name] if one.start_byte < each.start_byte < declared(
            one).child_by_field_name("body").start_byte), None) for one in others]
        own = {given(place.parent) if place else (source(declared(one).child_by_field_name("type"), text),): one
               for one, place in zip(others, places)}
        asked = {given(one.parent) for one in lists[name] if one not in places}
        if len(asked) == 1 and asked <= own.keys() and words[name] == len(lists[name]) + 1 + places.count(None):
            node = own[asked.pop()]
            return edited(text, [*((one.start_byte, one.end_byte, "") for one in lists[name]),
                                 *(line_of(one, text) for one in others if one != node),
                                 (first.start_byte, re.compile(r"\s*").match(text, line_of(first, text)[1]).end(), ""),
                                 (node.start_byte, node.start_byte + len("template <> "), "")])
    return text


def is_copy(node, name, of, takers, text):
    """True if a declaration in a block makes `name` equal to another variable of the same type, which does not change in the block."""
    function = enclosing(node, "function_definition")
    if node.parent.type != "compound_statement" or function is None or "//" in text[node.end_byte:text.index("\n", node.end_byte)]:
        return False
    made = collections.Counter(name_of(each) for one in descendants(
        function, "declaration", "parameter_declaration", "optional_parameter_declaration", "for_range_loop")
                               for each in one.children_by_field_name("declarator"))
    uses = [one for one in descendants(node.parent, "identifier") if source(one, text) == of]
    return made[name] == made[of] == 1 and not any(may_write(use, takers) for use in uses) and (
        type_of(of, node, text) == source(node.child_by_field_name("type"), text))


def without_aliases(text):
    """Expands aliases of constants, and inside functions aliases of types and copies of variables."""
    root, all_edits, changed = parse(text), [], set()
    takers = takers_of(text)
    top = {name for unit in units_of(root, text.split("\n")) for name in unit.names} | {"true", "false"}
    for node in descendants(root, "declaration", "alias_declaration"):
        is_type = node.type == "alias_declaration"
        scope = enclosing(node, "function_definition", "struct_specifier", "translation_unit")
        found = re.fullmatch(r"using (\w+) = ([^;[]+);" if is_type else
                             r"const(?:expr)? (?:int|bool|auto|float) (\w+) = ([A-Za-z]\w*|0);", source(node, text))
        if not found or is_type and scope.type == "translation_unit" or node.parent.type == "template_declaration":
            continue
        uses = [one for one in descendants(scope, "identifier", "type_identifier", "namespace_identifier")
                if source(one, text) == found[1] and not node.start_byte <= one.start_byte < node.end_byte]
        places = [(one.start_byte, one.end_byte) for one in uses]
        if scope.type == "struct_specifier":
            places += [one.span() for one in re.finditer(
                rf"(?:typename )?\b{name_of(scope)}::{found[1]}\b", text)]
            if len(re.findall(rf"\b{found[1]}\b", text)) != len(places) + 1:
                continue
        copies = not is_type and scope.type == "function_definition" and is_copy(node, found[1], found[2], takers, text)
        most = 99 if found[2] in ("true", "false") or copies else 2 if re.fullmatch(r"[\w:<>]+", found[2]) else 1
        is_local = scope.type != "translation_unit" and found[2] != "0"
        if found[2] == "0" and scope.type != "function_definition":
            continue
        if is_local and (len(places) > most or not is_type and not copies and found[2] not in top):
            continue
        start, end, _ = line_of(node, text)
        if not text[end:].lstrip(" ")[:1].isalpha():  # its comment does not apply to the declarations after it
            start -= len(comment_above(start, text))
        edits, words = [(start, end, ""), *((*place, found[2]) for place in places)], {found[1], *words_of(found[2])}
        if not words & changed and are_apart(all_edits, edits):
            all_edits += edits
            changed |= words
    return edited(text, all_edits)


def without_unused_constants(text):
    """Removes constants that no other code names from lists of constants."""
    words = collections.Counter(re.findall(r"\w+", re.sub(r"//.*", "", text)))
    for match in re.finditer(r"^constexpr (\w+) (\w+ = [^;]*);\n", text, re.MULTILINE):
        parts = re.split(r",\s+(?=\w+ = )", match[2])
        kept = [part for part in parts if words[re.match(r"\w+", part)[0]] > 1]
        if kept != parts and len(parts) > 1:
            own = f"constexpr {match[1]} {', '.join(kept)};\n" if kept else ""
            return text[:match.start()] + own + text[match.end():]
    return text


def with_numbers(text):
    """Expands constant members of structs where other code uses them."""
    structs = collections.defaultdict(list)
    for node in descendants(parse(text), "struct_specifier"):
        structs[name_of(node)].append(node)
    for name, nodes in structs.items():
        lists = re.findall(r"static constexpr int ([^;]*);", nodes[0].text.decode()) if len(nodes) == 1 and name else []
        for member, value in re.findall(r"\b(\w+) = (\d+)(?=,|$)", "\n".join(lists), re.MULTILINE):
            text = re.sub(rf"\b{name}(?:<\w+>)?::{member}\b", value, text)
    return text


# ---- options of other builds ----

# Members of SdpaParams that require an option.
WITH = {"page_table": ("page_stride", "page_size", "pages"), "k_lengths": ("most_keys",),
        "bias": ("bias_strides", "bias_keys"), "bias_map": ("bias_map_bytes",)}


def without_options(text):
    """Removes members of SdpaParams that only other builds use (their value is 0), and the rows that refuse them."""
    table = re.search(r"\boptions\[\] = \{(.*?)\};", text, re.DOTALL)
    rows = re.findall(r"\{\"(\w+)\", (\w+|\"[^\"]*\"), ([^{}]*)\}", table[1])
    known = dict(re.findall(r"\b(needs_\w+) = (\"[^\"]*\")", text))
    kept = [row for row in rows if known.get(row[1], row[1]) == '""' or row[1].isidentifier() and row[1] not in known]
    is_open = any(of.isidentifier() and of not in known for _, of,
                  _ in kept)  # depends on the row of the table of tiles
    text = text.replace(table[1], ", ".join(f'{{"{name}", {known.get(of, of)}, {rest}}}' if is_open
                                            else f'{{"{name}", {rest}}}'
                                            for name, of, rest in kept))
    if not is_open:
        text = re.sub(r"^ *if \(x\.value && \*x\.\w+\) return .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"const char \*name, \*\w+;.*\n", "const char* name;\n", text)
        text = text.replace("// Refuses options that this build does not support, and pointers", "// Refuses pointers")
    text = re.sub(r"^ *const char ?\*[^;]*\bneeds_\w+ = \"[^;]*;\n", "", text, flags=re.MULTILINE)
    gone = {name for name, *_ in rows} - {name for name, *_ in kept}
    gone |= {name for option in gone for name in WITH.get(option, ())}
    for name in gone:
        text = re.sub(rf",\s+\{{\"{name}\", p\.[^{{}}]*\}}|; {name}=%g[^\"]*(?=\")|,\s*double\(p\.{name}\)", "", text)
        text = re.sub(rf"\b(?:\w+\.)+{name}\b(?:\.\w+)*(?! =[^=])", "0", text)
    text = re.sub(r", given = !0 [^;]*|\bgiven,\s*", "", text)
    params = next(one for one in descendants(parse(text), "struct_specifier") if name_of(one) == "SdpaParams")
    return edited(text, [edit for node in descendants(params, "field_declaration")
                         if gone & {name_of(one) for one in node.children_by_field_name("declarator")}
                         for edit in members_without(node, gone, text)])


def without_memory(text):
    """Removes the workspace and the scratch memory of the forward pass if no problem needs any."""
    for name in ("workspace", "scratch"):
        without = re.sub(rf"^(?://.*\n)*.*\bsdpa_{name}_bytes\(SdpaParams\) \{{\s*return 0;\s*\}}\n", "", text, flags=re.MULTILINE)
        if without == text:
            continue
        text = re.sub(rf"\{{\"{name}\", uintptr_t\(p\.[^{{}}]*\}},\s*", "", without)
        params = next(one for one in descendants(parse(text), "struct_specifier") if name_of(one) == "SdpaParams")
        start, end, _ = next(line_of(one, text) for one in descendants(params, "field_declaration")
                             if name_of(one.child_by_field_name("declarator")) == name)
        text = text[:start - len(comment_above(start, text))] + text[end:]
    return text if "sdpa_scratch_bytes" in text else text.replace("; smaller if `scratch` is set", "")


# ---- unused members ----

def without_unread_members(text):
    """Removes members that are never read, with their initializers and assignments."""
    root, edits = parse(text), []
    code = re.sub(r"//.*", lambda m: " " * len(m[0]), text)
    words = collections.Counter(re.findall(r"\w+", code))
    positional = {*re.findall(r"\b([A-Z]\w+)(?: \w+)?\{(?!\})", code),
                  *re.findall(r"\b([A-Z]\w+) \w+\([^)]*\)(?: const)? \{\s*return \{", code)}
    writes = collections.defaultdict(list)
    for node in descendants(root, "assignment_expression"):
        left = node.child_by_field_name("left")
        if left.type in ("field_expression", "identifier") and source(node, text).split(left.text.decode())[1].startswith(" = "):
            writes[name_of(left.child_by_field_name("field") or left)].append(node)
    for node in descendants(root, "field_initializer"):
        writes[source(node, text).split("(")[0].split("{")[0]].append(node)
    declared_in = collections.Counter(name_of(one) for node in descendants(root, "field_declaration")
                                      for one in node.children_by_field_name("declarator"))
    for struct in descendants(root, "struct_specifier"):
        for node in descendants(struct, "field_declaration"):
            is_static = "static" in source(node, text).split()
            if descendants(node, "function_declarator") or not struct.child_by_field_name("name") or (
                    not is_static and name_of(struct) in positional) or (
                        enclosing(node.parent, "struct_specifier") != struct):
                continue
            names = [name_of(one) for one in node.children_by_field_name("declarator")]
            for name in names:
                places = writes[name]
                is_plain = all(write.type == "field_initializer" or
                               write.parent.type in ("expression_statement", "comma_expression")
                               for write in places)
                if words[name] == declared_in[name] + len(places) and is_plain and (
                        declared_in[name] == 1 or not places):
                    own = [place_of(write, text) for write in places] + members_without(node, [name], text)
                    edits += own if are_apart(edits, own) else []
    return edited(text, edits)


def place_of(write, text):
    """The edits that remove the assignment or initializer of a member."""
    if write.type == "field_initializer":
        nodes = [one for one in write.parent.named_children if one.type == "field_initializer"]
        if len(nodes) == 1:
            return len(text[:write.parent.start_byte].rstrip()), write.parent.end_byte, ""
        return (*without_one(nodes, nodes.index(write)), "")
    if write.parent.type == "expression_statement":
        outer = write.parent.parent
        if outer.type != "if_statement" or outer.child_by_field_name("alternative"):
            return line_of(write.parent, text)
        start, end, _ = line_of(outer, text)  # a branch without another statement, with its comment
        return start - len(comment_above(start, text)), end, ""
    left, right = write.parent.child_by_field_name("left"), write.parent.child_by_field_name("right")
    return (left.start_byte, right.start_byte, "") if left == write else (left.end_byte, right.end_byte, "")


def members_without(node, gone, text):
    """The edits that remove names from a declaration of members."""
    names = node.children_by_field_name("declarator")
    if all(name_of(one) in gone for one in names):
        start, end, _ = line_of(node, text)
        more = re.match(r"(?: {20,}//.*\n)*", text[end:])[0] if text[end - 1] == "\n" else ""
        return [(start, end + len(more), "")]
    whole = text[node.start_byte:node.end_byte - 1]
    head = whole[:names[0].start_byte - node.start_byte]
    parts = [part for part in re.split(r", (?![^{(]*[})])", whole[len(head):])
             if re.match(r"\W*(\w+)", part)[1] not in gone]
    return [(node.start_byte, node.end_byte, head + ", ".join(parts) + ";")]


# ---- definitions before their uses ----

class Part:
    """A declaration with its comment, and the names that must be defined before it."""

    def __init__(self, unit, lines):
        self.unit, self.names, self.first, self.last = unit, unit.names - {""}, unit.first, unit.last
        self.text = "\n".join(lines[unit.first:unit.last + 1]).strip("\n")
        self.uses = {name.strip(".(") for name in set(unit.uses).union(*(part.uses for part in unit.parts))}
        code = re.sub(r"//.*", "", self.text).strip()
        self.is_kernel, self.is_special = "__global__" in code, code.startswith("template <>")
        self.is_declaration = "{" not in code and bool(re.search(
            r"\)(?: const)?;$|^(?:template <.*?> )?struct \w+;$", code, re.DOTALL))
        self.has_defaults = bool(re.search(r"= [^;]*[,)>]", code))


def parts_of(text):
    """The parts of a file in order. The title of a section belongs to its kernel, or to its first part."""
    lines = text.split("\n")
    parts = [Part(unit, lines) for unit in sorted(units_of(parse(text), lines), key=lambda unit: unit.first)]
    titles = [n for n, line in enumerate(lines) if line.startswith(BANNERS)]
    for title, following in zip(titles, [*titles[1:], len(lines)]):
        end = next(n for n in range(title + 1, len(lines)) if not lines[n].startswith("//"))
        section = [part for part in parts if title < part.first < following]
        if "\n".join(lines[title + 1:end]).strip("/\n ") and section and section[0].first >= end:
            owner = next((part for part in section if part.is_kernel), section[0])
            intro = re.sub(r"^(?://\n|\n)+|(?:\n//|\n)+$", "", "\n".join(lines[title + 1:end]))
            owner.text = f"{intro}\n\n{owner.text}"
    return parts


def in_order(parts):
    """Sorts the parts so that each comes after those that it needs, and a kernel after the member functions that are defined
    outside of their struct. Removes forward declarations that are then redundant."""
    named = collections.defaultdict(list)
    for part in parts:
        for name in part.names:
            named[name].append(part)

    def is_needless(part):
        others = [one for name in part.names for one in named[name] if not one.is_declaration]
        return part.is_declaration and others and not part.has_defaults and not any(one.is_special for one in others)
    out, seen = [], {id(part) for part in parts if is_needless(part)}

    def add(part):
        if id(part) in seen:
            return
        seen.add(id(part))
        members = {name for one in part.unit.parts
                   for name in one.names} if part.unit.kind == "struct_specifier" else set()
        for other in parts if part.is_kernel else []:
            if other.unit.scopes:  # a member function that is defined outside of its struct
                add(other)
        made = {name for name in named if part.unit.begins and name.startswith(part.unit.begins)}
        for name in sorted((part.uses & named.keys() | made) - members, key=lambda name: named[name][0].first):
            is_declared = any(one.is_declaration and not is_needless(one) for one in named[name])
            for other in named[name]:
                if is_declared and not other.is_declaration and not other.is_special:
                    continue  # placed later
                if not part.names & other.names or other.first < part.first:
                    add(other)
        out.append(part)
        for operator in parts:
            if not operator.names and operator.unit.types & part.names:
                add(operator)
    for part in parts:
        add(part)
    return out


def chapters(text):
    """The text in four chapters: the problem, the steps, the kernel, the call."""
    parts = parts_of(text)
    public, call = ([part for part in parts if part.names & names]
                    for names in (PUBLIC, CALLS))
    ordered = in_order([*public, *(part for part in parts if part not in public)])
    last = max(n for n, part in enumerate(ordered) if part in public) + 1
    inner = [part for part in ordered[last:] if part not in call]
    kernels = [n for n, part in enumerate(inner) if part.is_kernel]

    def chapter(title, parts):
        return [f"// ==== {title} ".ljust(101, "=") + "\n", *texts(parts)]
    return [*chapter("the problem", ordered[:last]), "namespace {\n", *chapter("the steps", inner[:kernels[0]]),
            *chapter("the kernel", inner[kernels[0]:kernels[-1] + 1]), *chapter("the call", inner[kernels[-1] + 1:]),
            "}  // namespace\n", *texts(call)]


def texts(parts):
    """Joins the texts of parts, with an empty line between parts that were not neighbours."""
    out = []
    for part, after in zip(parts, [*parts[1:], None]):
        is_short = after and max(part.text.count("\n"), after.text.count("\n")) < 6
        out.append(part.text + "\n" * (not is_short))
    return out


# ---- the shapes of wgmma that are used ----

def wgmma(text, rows):
    """Replaces the functions for all wgmma shapes by one function for each shape that the kernels use. rows: the knobs of the
    builds."""
    def columns(word, row):
        of_v = {"D_V": row["HEAD_DIM_V"] or row["HEAD_DIM"]}
        return int(word) if word.isdigit() else (row | of_v)[re.sub(r"\w+::", "", word).upper()]
    text = re.sub(r"(\bwgmma_[sr]s<)Input,", r"\1KeyValue,", text)
    calls = set()
    for kind, element, word, trans in re.findall(r"\bwgmma_(ss|rs)<(KeyValue|__\w+), ([\w:]+)((?:, \d)+)>\(", text):
        transposes = [*map(int, re.findall(r"\d", trans)), 0][:2 if kind == "ss" else 1]  # TRANS_A is 0 by default
        calls |= {(kind, element, columns(word, row), *transposes) for row in rows}
    calls = sorted(calls)
    kinds = collections.Counter(kind for kind, *_ in calls)
    alone = [kind for kind, count in kinds.items() if count == 1]  # a single shape replaces the declaration of the template
    functions = "\n".join(wgmma_function(text, *call) for call in calls if call[0] not in alone)
    text = re.sub(r"(?:^//.*\n)*^#define SDPA_D4\((?:.|\n)*?(?=^template <class E, int N, int TRANS_B, int TRANS_A>)",
                  "", text,
                  flags=re.MULTILINE)
    text = re.sub(r"^template <class E, int N, int TRANS_B, int TRANS_A>\n(?:.*\n)*?}\n", lambda m: functions, text,
                  flags=re.MULTILINE)
    text = re.sub(r"^template <class E, int N, int TRANS_B>\n.*wgmma_rs.*\{\n(?:.*\n)*?}\n", "", text,
                  flags=re.MULTILINE)
    for call in calls:
        if call[0] in alone:
            own, name = wgmma_function(text, *call, is_alone=True), f"wgmma_{call[0]}"
            text = re.sub(rf"^template <class E, int N[^>]*>\n[^\n]*\b{name}\([^\n]*;\n", lambda m, own=own: own, text,
                          flags=re.MULTILINE)
            text = re.sub(rf"\b{name}<[^<>]*>\(", name + "(", text)
    return text


def without_uncalled_shapes(text):
    """Removes the versions of wgmma functions for transposes that no call has, after unused code is gone."""
    def version(kind, digits):
        return kind, *[*map(int, re.findall(r"\d", digits)), 0][:2 if kind == "ss" else 1]
    called = {version(*one) for one in re.findall(r"(?<!void )\bwgmma_(ss|rs)<\w+, [\w:]+((?:, \d)+)>\(", text)}
    return re.sub(r"^template <> .*\bvoid wgmma_(ss|rs)<\w+, \d+((?:, \d)+)>\((?:.*\n)*?}\n+",
                  lambda m: m[0] if version(m[1], m[2]) in called else "", text, flags=re.MULTILINE)


def wgmma_shapes(text, rows):
    """Reduces the macros for all wgmma shapes to those with the numbers of columns that a table of tiles has."""
    words = re.findall(r"\bwgmma_(?:ss|rs)<(?:\w+|Element<B>), B::(block_m|block_n|d_v),", text)
    words += ["head_dim"] * ("OfQK" in text)  # of dQ and dK, which are products of the build with one width, as O is of the other
    widths = [row | {"D_V": row["HEAD_DIM_V"] or row["HEAD_DIM"]} for row in rows if row["is_wgmma"]]
    sizes = sorted({row[word.upper()] for word in words for row in widths
                    if word in ("d_v", "head_dim") or row["SWAP_AB"] == (word == "block_m")})
    rows_of = dict(re.findall(r"X\((\d+), (.*?)\)", text[text.index("#define SDPA_WGMMA_SHAPES"):].split("\n\n")[0]))
    text = re.sub(r"(#define SDPA_WGMMA_SHAPES\(X\)) (?:.*\\\n)+.*\n", lambda m: m[1] + "".join(
        f" \\\n  X({n}, {rows_of[str(n)]})" for n in sizes) + "\n", text)
    steps = [f"#define SDPA_D{n // 2}(F) " + f"SDPA_D{before // 2}(F) " * (before > 0) + " ".join(
        f"F({i})" for i in range(max(before // 2, 1), n // 2)) + "\n" for before, n in itertools.pairwise([0, *sizes])]
    return re.sub(r"(?:^#define SDPA_D\d+\(F\) .*\n)+", lambda _: "".join(steps), text, flags=re.MULTILINE)


def wgmma_function(text, kind, name, n, trans_b, trans_a=0, is_alone=False):
    """The function of one wgmma shape with N columns: a specialization, or a function if it is the only one. Operand N / 2 is
    the accumulate flag, the next one is the descriptor of B."""
    element = re.search(r"using KeyValue = (\w+);", text)[1] if name == "KeyValue" else name
    r, is_8bit = n // 2, element == "__nv_fp8_e4m3"
    types = "k32.f32.e4m3.e4m3" if is_8bit else {"__half": "k16.f32.f16.f16",
                                                 "__nv_bfloat16": "k16.f32.bf16.bf16"}[element]
    a_text = f"%{r + 2}" if kind == "ss" else "{" + ", ".join(f"%{r + 2 + i}" for i in range(4)) + "}"
    immediates = "1, 1" + ("" if is_8bit else f", {trans_a}, {trans_b}" if kind == "ss" else f", {trans_b}")
    a_type, a_operands = ("uint64_t a", '"l"(a)') if kind == "ss" else (
        "const uint32_t (&a)[4]", ", ".join(f'"r"(a[{i}])' for i in range(4)))
    sums = ", ".join(f"%{i}" for i in range(r))
    words = [f'"{line} "' for line in textwrap.wrap(
        f"{{ .reg .pred p; setp.ne.b32 p, %{r}, 0; wgmma.mma_async.sync.aligned.m64n{n}{types} {{{sums}}}, "
        f"{a_text}, %{r + 1}, p, {immediates}; }}", WIDTH - 10)]
    operands = textwrap.wrap(", ".join(f'"+f"(d[{i}])' for i in range(r)), WIDTH - 10)
    arguments = f"{name}, {n}, {trans_b}" + (f", {trans_a}" if kind == "ss" else "")
    version = f"<{arguments}>" * (not is_alone)
    return "\n".join([
        f"{'template <> ' * (not is_alone)}__device__ __forceinline__ void wgmma_{kind}{version}(",
        f"    float (&d)[{r}], {a_type}, uint64_t b, bool accumulate) {{",
        "  // clang-format off", "  asm volatile(", *("      " + line for line in words),
        "      : " + "\n        ".join(operands), f'      : "r"(int(accumulate)), "l"(b), {a_operands});',
        "  // clang-format on", "}", ""])


# What is left of statements and expressions after the other changes, and what replaces it.
LEFT = [(r"\{\s*if \(([\w.]+)\) return;\s*([^{};]+;)\s*\}", r"{\n  if (!\1) \2\n}"),
        (r"\bunion \{\s*([^;{}]+;)(?: *//.*)?\s*\};", r"\1"),  # of one member
        (r"(?:const )?[A-Z]\w+ (\w+) = ([^;]*);\s*return \1;", r"return \2;"),
        (r"\breturn (?:size_t|int64_t|uint32_t|int)\((\d+)\);", r"return \1;"),
        (r"^( *)status = ([^;]*);\s*return status;", r"\1return \2;"),
        (r"\bif \([^;{}]*\) return (\w+);\s*return \1;", r"return \1;"),
        (r"\bint\(true\)", "1"), (r"<\((\w+(?: [-+*] \w+)*)\)>", r"<\1>"), (r"\[\(+([^()\[\]]*)\)+\]", r"[\1]"), (r"(?<=[*+=] )\((\w+\([^()]*\))\)(?=[;),])", r"\1"),
        (r"^ *(?:\[\[maybe_unused\]\] )?constexpr int (\w+) = (\d+);.*\n#pragma unroll \1\n", r"#pragma unroll \2\n"),
        (r"(?<=\.|:)template (?=\w+\()", "")]


def simplified(text):
    """Replaces the patterns in LEFT, and removes "template" before names of members outside of templates."""
    inside = Around(parse(text), "template_declaration")
    gone = [(one.start_byte, one.named_children[0].start_byte, "") for one in descendants(parse(text), "dependent_name")]
    text = edited(text, [edit for edit, one in zip(gone, descendants(parse(text), "dependent_name")) if not inside(one)])
    for pattern, instead in LEFT:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def shortest(text, instructions, sizes=()):
    """Evaluates conditions with known values, inlines calls and removes unused code. instructions: functions to keep. sizes:
    constants that keep their names."""
    def step(text):
        for change in (lambda text: minimal(text, {*sizes}), without_memory, without_aliases, without_unused_constants, with_numbers,
                       lambda text: without_other_versions(text, instructions),
                       lambda text: without_template_parameters(text, instructions),
                       lambda text: without_unread_parameters(text, instructions), without_unread_members,
                       lambda text: without_idle_functions(text, instructions),
                       lambda text: without_needless_parameters(text, instructions), without_unread_fields,
                       lambda text: without_unused_results(text, instructions), without_same_casts, without_bundles,
                       lambda text: with_single_values(text, PUBLIC), without_conditions_of_loops, without_needless_blocks,
                       lambda text: minimal(inlined(text, instructions | ROOTS), {*sizes})):
            text = until_stable(change, text)
        return simplified(text)
    return until_stable(step, text)


def concrete(text, instructions, sizes):
    """The text of a single build in chapters. instructions: functions to keep. sizes: constants that may be changed."""
    text, constants = without_build(text)
    text = re.sub(r"(?=^// ==== 2 PROBLEM)", lambda m: constants + "\n", text, count=1, flags=re.MULTILINE)
    return "\n".join(chapters(shortest(text, instructions, sizes)))
