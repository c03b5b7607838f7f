"""Removes from an extract what has a single value or only stands for something else: members with one value, conversions to
the same type, conditions of the enclosing loop, and local structs that only hold other variables. Used by tools/concrete.py."""
import re

from calls import Calls, data_members, line_of, may_write, positional, takers_of, without_one
from inlining import ATOMS, WHOLE, Inlining, are_apart, comment_above, edited, source, type_of
from minimal import aliases_of, callee, descendants, enclosing, listed, name_of, parse

NUMBER = re.compile(r"\d+|true|false|[A-Z][A-Z0-9_]+")  # or the name of a constant
NUMERIC = {"int", "bool", "unsigned", "uint32_t", "int64_t", "size_t"}


def with_single_values(text, but):
    """Replaces a member by its value if that is the same number in all objects and never changes: at most one of each struct."""
    calls, all_edits, takers = Calls(text), [], takers_of(text)
    fields, inside = {}, {}
    for node in descendants(calls.root, "field_expression"):
        owner = calls.type(node.child_by_field_name("argument"))
        fields.setdefault(name_of(node.child_by_field_name("field")), []).append((owner if calls.is_known(owner) else None, node))
    for node in descendants(calls.root, "identifier"):
        name = source(node, text)
        struct = calls.struct_at(node)
        if struct and not calls.local(name, node):
            inside.setdefault((struct, name), []).append(node)
    for struct, node in calls.structs.items():
        if not node or struct in but or node.parent.type == "template_declaration" or calls.bases[struct] or (
                any(struct in bases for bases in calls.bases.values())):
            continue
        members, _ = data_members(node)
        lists = positional(struct, calls, text)
        if lists is None or len(members) < 2:
            continue
        for n, (name, declarator, field) in enumerate(members):
            default = field.child_by_field_name("default_value")
            if source(field.child_by_field_name("type"), text) not in NUMERIC or declarator.type != "field_identifier":
                continue
            made = [source(one, text) for one in descendants(node, "field_initializer") if name_of(one) == name]
            is_bare = re.search(rf"\b{struct} \w+(?:;|\{{\}})", text)
            if made or not lists and not default or is_bare and not default:
                continue
            values = {source(one[n], text) if n < len(one) else source(default, text) if default else "" for one in lists} or {
                source(default, text)}
            value = values.pop()
            places = [one for _, one in fields.get(name, [])] + inside.get((struct, name), [])
            if values or not NUMBER.fullmatch(value) or any(owner != struct for owner, _ in fields.get(name, [])) or (
                    any(may_write(one, takers) for one in places) or not places or f"::{name}" in text):
                continue
            whole = field.children_by_field_name("declarator")
            edits = [(one.start_byte, one.end_byte, value) for one in places]
            edits += [(*without_one(one, n), "") for one in lists if n < len(one)]
            if len(whole) == 1:
                start, end, _ = line_of(field, text)
                edits.append((start - len(comment_above(start, text)), end, ""))
            elif not default:
                edits.append((*without_one(whole, whole.index(declarator)), ""))
            else:
                continue
            if are_apart(all_edits, edits):
                all_edits += edits
                break
    return edited(text, all_edits)


def without_same_casts(text):
    """Removes conversions of an expression to the type that it has."""
    kinds, edits = Inlining(text, None), []
    alias = aliases_of(text)
    for call in descendants(kinds.root, "call_expression"):
        given, function = listed(call, "arguments"), source(call.child_by_field_name("function"), text)
        if len(given) != 1:
            continue
        value = given[0]
        to = re.fullmatch(r"(?:rounded<)?(float|double|int|uint32_t|int64_t|size_t)>?", function)
        pointer = re.fullmatch(r"reinterpret_cast<(?:const )?(\w+)\*>", function)
        if to and kinds.kind(value) != to[1] or not to and not pointer:
            continue
        if pointer:
            first = re.match(r"\w+", source(value, text))
            kind = first and type_of(first[0], value, text, "pointer_declarator")
            if kind not in alias or alias[kind] != alias.get(pointer[1]):
                continue
        is_whole = value.type in ATOMS or call.parent.type in WHOLE
        edits.append((call.start_byte, call.end_byte, source(value, text) if is_whole else f"({source(value, text)})"))
    return edited(text, edits)


def operands(condition, text):
    """The variables and members in a condition, as text."""
    return [source(one, text) for one in descendants(condition, "identifier", "field_expression")
            if one.parent.type != "field_expression"]


def overlap(one, other):
    """True if one of two paths such as `a.b` contains the other."""
    return one == other or one.startswith((f"{other}.", f"{other}[")) or other.startswith((f"{one}.", f"{one}["))


def without_conditions_of_loops(text):
    """Removes an if with the condition of the enclosing for, or this operand of &&, if the loop's body does not write what the
    condition reads."""
    for loop in descendants(parse(text), "for_statement"):
        condition, body = loop.child_by_field_name("condition"), loop.child_by_field_name("body")
        if condition is None or condition.type != "binary_expression":
            continue
        read = operands(condition, text)
        written = [source(one.child_by_field_name("left") or one.child_by_field_name("argument"), text)
                   for one in descendants(body, "assignment_expression", "update_expression")]
        given = [source(one, text) for call in descendants(body, "call_expression") for one in listed(call, "arguments")]
        given += [source(one.child_by_field_name("argument"), text) for call in descendants(body, "call_expression")
                  for one in [call.child_by_field_name("function")] if one.type == "field_expression"]
        changed = written + [one for one in given if any(each.startswith((f"{one}.", f"{one}[")) for each in read)]
        if any(overlap(one, each) for one in read for each in changed):
            continue
        for one in descendants(body, "if_statement"):
            block = one.child_by_field_name("consequence")
            own = one.child_by_field_name("condition").named_children
            for part in descendants(one.child_by_field_name("condition"), "binary_expression") if one.parent == body else []:
                sides = [part.child_by_field_name(side) for side in ("left", "right")]
                if source(part.child_by_field_name("operator"), text) == "&&" and source(condition, text) in [
                        source(side, text) for side in sides]:
                    rest = next(side for side in sides if source(side, text) != source(condition, text))
                    return edited(text, [(part.start_byte, part.end_byte, source(rest, text))])
            if [source(each, text) for each in own] == [source(condition, text)] and one.parent == body and (
                    block.type == "compound_statement" and not one.child_by_field_name("alternative")):
                return edited(text, [(one.start_byte, one.end_byte, outdented(block, text))])
    return text


def constructor_values(struct, node, arguments, calls, text):
    """{member: its value} of an object that a constructor makes from names alone; None if it does more."""
    own = calls.functions.get((struct, struct), [])
    methods = [one for (owner, _), nodes in calls.functions.items() if owner == struct for one in nodes]
    if not own:
        return None if methods else {name: value for (name, _, _), value in zip(data_members(node)[0], arguments)}
    if len(own) != 1 or len(methods) != 1 or own[0].child_by_field_name("body").named_children:
        return None
    parameters = [name_of(one) for one in calls.parameters(own[0])]
    given = dict(zip(parameters, arguments))
    out = {}
    for one in descendants(own[0], "field_initializer"):
        made = re.fullmatch(r"(\w+)[({](\w+)[)}]", source(one, text))
        if not made or made[2] not in given:
            return None
        out[made[1]] = given[made[2]]
    return out


def without_bundles(text):
    """Replaces the members of a local struct that only holds names of other variables, or values that do not change, by these."""
    calls = Calls(text)
    for node in descendants(calls.root, "declaration"):
        if edits := bundle_edits(node, calls, text):
            return edited(text, edits)
    return text


def bundle_edits(node, calls, text):
    """The edits that replace a local struct, which a declaration makes; empty if it must stay."""
    kind, declarators = node.child_by_field_name("type"), node.children_by_field_name("declarator")
    function, struct = enclosing(node, "function_definition"), kind and calls.structs.get(source(kind, text))
    if not struct or len(declarators) != 1 or function is None or node.parent.type != "compound_statement" or (
            calls.bases[name_of(struct)]):
        return []
    name, scope, members = name_of(declarators[0]), node.parent, data_members(struct)[0]
    # `X x(a, b);` is parsed as the declaration of a function.
    value = declarators[0].child_by_field_name("value") or declarators[0].child_by_field_name("parameters")
    if value is None or value.type not in ("argument_list", "initializer_list", "parameter_list"):
        return []
    made = constructor_values(name_of(struct), struct, [source(one, text) for one in value.named_children], calls, text)
    if not made or {one for one, _, _ in members} != made.keys():
        return []
    rest = re.sub(r"//.*", "", text[node.end_byte:scope.end_byte])
    uses = [one.parent for one in descendants(scope, "identifier")
            if source(one, text) == name and one.start_byte > node.end_byte and one.parent.type == "field_expression" and
            one.parent.child_by_field_name("argument") == one]
    if not uses or len(uses) != len(re.findall(rf"\b{name}\b", rest)):
        return []
    written = [source(one.child_by_field_name("left") or one.child_by_field_name("argument"), text)
               for one in descendants(scope, "assignment_expression", "update_expression")]
    is_const, code = source(node, text).startswith("const "), re.sub(r"//.*", "", source(function, text))
    lines, edits = [], []
    for member, declarator, field in members:
        to, own = made[member], f"{name}.{member}"
        parts = {one.removeprefix(own + ".").split("[")[0] for one in written if one.startswith(own + ".")}
        is_path = re.fullmatch(r"\w+(\.\w+)*", to)
        # A copy that changes may stand for the variable if nobody reads from the variable what changes.
        is_free = not any(re.search(rf"(?<![\w.]){to}{part}\b", rest) for part in [rf"\.{one}" for one in parts] + [r"(?![\w.])"] * bool(parts))
        if is_path and own not in written and (
                declarator.type == "reference_declarator" or is_free if parts else not changes(to, node, scope, text)):
            instead = to
            if parts and declarator.type != "reference_declarator":  # it is no longer constant
                edits += [(one.start_byte, one.start_byte + len("const "), "") for one in descendants(function, "declaration")
                          if re.match(rf"const \w+ {to}\(", source(one, text))]
        elif is_path and declarator.type == "reference_declarator":
            instead = to
        elif is_const and declarator.type == "field_identifier" and (
                len(re.findall(rf"\b{member}\b", code)) == len(re.findall(rf"\b{name}\.{member}\b", code))):
            instead = member
            lines.append(f"const {source(field.child_by_field_name('type'), text)} {member} = {to};")
        else:
            return []
        edits += [(one.start_byte, one.end_byte, instead) for one in uses if name_of(one.child_by_field_name("field")) == member]
    indent = "\n" + " " * node.start_point[1]
    return [*edits, (node.start_byte, node.end_byte, indent.join(lines)) if lines else line_of(node, text)]


def changes(path, after, scope, text):
    """True if a variable, or a member of one, is assigned to after a node, or passed to a function that may do so."""
    takers = takers_of(text)
    given = [one for call in descendants(scope, "call_expression") if call.start_byte > after.end_byte and name_of(callee(call)) in takers
             for one in listed(call, "arguments")]
    return any(overlap(path, source(one, text)) for one in given) or any(one.start_byte > after.end_byte and overlap(path, source(
        one.child_by_field_name("left") or one.child_by_field_name("argument"), text))
        for one in descendants(scope, "assignment_expression", "update_expression"))


def without_needless_blocks(text):
    """Removes the braces of a block in a block if it declares nothing."""
    for block in descendants(parse(text), "compound_statement"):
        own = [one for one in block.named_children if one.type != "comment"]
        if block.parent.type == "compound_statement" and own and not any(
                one.type in ("declaration", "alias_declaration", "using_declaration") for one in own):
            return edited(text, [(block.start_byte, block.end_byte, outdented(block, text))])
    return text


def outdented(block, text):
    """The statements of a block without its braces, indented as the block is."""
    inner = text[block.start_byte + 1:block.end_byte - 1].strip("\n").rstrip()
    return "\n".join(line.removeprefix("  ") for line in inner.split("\n")).lstrip()
