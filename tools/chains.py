"""The call chains of docs/READING.md, from a kernel to its instructions, computed from the syntax tree of sdpa.cu."""
import collections
import functools
import re

from cli import Refused
from minimal import descendants, enclosing, name_of, parameters_of, parse, words_of

# Per column: the kernel, structs of other builds to exclude, and for each instruction the functions through which the
# chain passes. The shortest such chain is shown.
K_COPY, PRODUCT, EXPONENTIAL = "copy of K", "Q @ K.T", "exp2"
COLUMNS = {
    "scalar": ("sdpa_scalar", "", {
        K_COPY: "ItemTiles::copy_kv cp_async", PRODUCT: "scalar_qk fmaf",
        EXPONENTIAL: "WarpSoftmax::step softmax_exp ex2_approx_ftz"}),
    "mma.sync": ("sdpa_mma", "E4m3|Capped", {
        K_COPY: "ItemTiles::copy_kv cp_async", PRODUCT: "MmaRows::compute_p_by_stale_max mma_m16n8k16",
        EXPONENTIAL: "MmaRows::compute_p_by_stale_max softmax_exp ex2_approx_ftz"}),
    "wgmma, plain": ("sdpa_wgmma_plain", "Capped", {
        K_COPY: "load_tile load_rows cp_async_bulk_tensor_load", PRODUCT: "wgmma_qk wgmma_ss",
        EXPONENTIAL: "softmax_sum ex2_approx_ftz"}),
    "wgmma, producers and consumers": ("sdpa_wgmma", "E4m3|Capped", {
        K_COPY: "WgmmaProducer::load_round load_rows cp_async_bulk_tensor_load",
        PRODUCT: "WgmmaConsumer::overlapped_loop wgmma_ss", EXPONENTIAL: "WgmmaConsumer::overlapped_loop softmax_exp ex2_approx_ftz"}),
    "the same, e4m3": ("sdpa_wgmma", "Wgmma16|Converter|Capped", {
        K_COPY: "WgmmaProducer::load_round load_rows cp_async_bulk_tensor_load",
        PRODUCT: "E4m3Consumer::issue_qk wgmma_rs", EXPONENTIAL: "E4m3Consumer::softmax_then_wait softmax_exp ex2_approx_ftz"}),
    "wgmma, transposed": ("sdpa_wgmma_columns", "", {
        K_COPY: "WgmmaColumnsLoader::load_first_tiles load_rows cp_async_bulk_tensor_load",
        PRODUCT: "WgmmaColumns::issue_kq wgmma_ss", EXPONENTIAL: "WgmmaColumns::write_p ex2_approx_ftz"}),
}


class Calls:
    """The call graph of sdpa.cu. Names of members include the struct, as in TileCopy::copy; names of lambdas include the
    function, as in Wgmma16Consumer::recompute_qk.lambda."""

    def __init__(self, text):
        text = text[text.index("// ==== 2 PROBLEM"):]  # before this marker, macros expand to declarations
        self.root = parse(re.sub(r"\btypename (?=[\w:]+\()", " " * 9, text))
        self.bodies, self.bases = collections.defaultdict(list), collections.defaultdict(set)
        for node in descendants(self.root, "function_definition"):
            self.bodies[self.owner(node) + name_of(node)].append(node)
        self.owners = collections.defaultdict(set)  # by the last component of a function's name
        for name in self.bodies:
            owner, _, last = name.rpartition("::")
            self.owners[last].add(owner)
        for node in descendants(self.root, "base_class_clause"):
            self.bases[name_of(node.parent)] |= words_of(node.text.decode())
        self.aliases = collections.defaultdict(list)  # nodes of `using`, by their names
        for node in descendants(self.root, "alias_declaration"):
            self.aliases[name_of(node)].append(node)
        self.lambdas = collections.defaultdict(list)
        for node in descendants(self.root, "lambda_expression"):
            self.lambdas[self.holder(node) + "." + self.lambda_name(node)].append(node)
        self.passed = collections.defaultdict(set)  # lambdas by (function, number of the argument)
        for caller in list(self.bodies):
            for call in self.own_calls(caller):
                for number, argument in enumerate(call.child_by_field_name("arguments").named_children):
                    name = self.lambda_name(argument) if argument.type == "lambda_expression" else name_of(argument)
                    if f"{caller}.{name}" in self.lambdas:
                        for called in self.meanings(call, caller):
                            self.passed[called, number].add(f"{caller}.{name}")

    @staticmethod
    def owner(node):
        """The struct of a function, followed by "::"; "" if it has none."""
        struct = enclosing(node.parent, "struct_specifier")
        outside = [one for one in descendants(node.child_by_field_name("declarator"), "qualified_identifier")
                   if one.parent.type == "function_declarator"]
        name = name_of(struct or (outside[0].child_by_field_name("scope") if outside else None))
        return name + "::" * bool(name)

    def holder(self, node):
        """The name of the function that contains a node; "" outside of functions."""
        function = enclosing(node, "function_definition")
        return self.owner(function) + name_of(function) if function else ""

    @staticmethod
    def lambda_name(node):
        return name_of(node.parent) if node.parent.type == "init_declarator" else "lambda"

    def own_calls(self, name):
        """The calls in a function or lambda, excluding nested lambdas."""
        for node in self.lambdas[name] if name in self.lambdas else self.bodies.get(name, []):
            for call in descendants(node.child_by_field_name("body") or node, "call_expression"):
                inner = enclosing(call.parent, "lambda_expression", "function_definition")
                if inner.start_byte == node.start_byte:
                    yield call

    def meant(self, name, node):
        """The types that a name may denote in a function, with their base types; None for an unconstrained template
        parameter. An alias in the function hides one in its struct, which hides a global one."""
        found, left = set(), {name}
        while left:
            name = left.pop()
            found.add(name)
            left |= self.bases[name] - found
            for place in (node, enclosing(node.parent, "struct_specifier"), self.root):
                own = [one for one in self.aliases[name] if place and place.start_byte <= one.start_byte < place.end_byte]
                if own:
                    left |= {word for one in own for word in words_of(one.child_by_field_name("type").text.decode())} - found
                    break
            else:
                template = node.parent if node.parent.type == "template_declaration" else None
                if template and name in parameters_of(template):
                    return None
        return found

    @staticmethod
    def type_of(target, node):
        """The name of the type of an expression before . or ->."""
        if target.type == "this":
            return name_of(enclosing(node.parent, "struct_specifier"))
        if target.type == "call_expression":  # of a constructor
            return name_of(target.child_by_field_name("function"))
        name = name_of(target.child_by_field_name("field") or target)
        for place in filter(None, (node, enclosing(node.parent, "struct_specifier"))):
            for one in descendants(place, "declaration", "parameter_declaration", "field_declaration"):
                if name in map(name_of, one.children_by_field_name("declarator")):
                    return name_of(one.child_by_field_name("type"))
        return ""

    def meanings(self, call, caller):
        """The functions and lambdas that a call in CALLER may refer to. Functions without a body here keep their plain names."""
        function = last = call.child_by_field_name("function")
        while inner := last.child_by_field_name("field") or last.type == "qualified_identifier" and last.child_by_field_name("name"):
            last = inner
        name = re.match(r"(?:template )?(\w*)", last.text.decode())[1]
        node, outer = enclosing(call, "function_definition"), caller.partition(".")[0]
        if function.type == "field_expression":
            meant = self.meant(self.type_of(function.child_by_field_name("argument"), node), node)
        elif function.type == "qualified_identifier":
            meant = self.meant(name_of(function.child_by_field_name("scope")), node)
        else:
            if f"{outer}.{name}" in self.lambdas:
                return {f"{outer}.{name}"}
            parameters = [name_of(one) for one in descendants(node.child_by_field_name("declarator"), "parameter_declaration")]
            if name in parameters:
                return self.passed.get((outer, parameters.index(name)), set())
            if not self.owners[name]:
                return {name}
            meant = {"", outer.rpartition("::")[0]}
        owners = self.owners[name] if meant is None else self.owners[name] & meant
        return {owner + "::" * bool(owner) + name for owner in owners}

    def callees(self, caller):
        return {called for call in self.own_calls(caller) for called in self.meanings(call, caller)}

    def extended(self, chain, target, others):
        """Extends a chain to a target with the fewest calls, avoiding functions of OTHERS; None if there is no path."""
        left, seen = collections.deque([chain]), {chain[-1]}
        while left:
            chain = left.popleft()
            for called in sorted(self.callees(chain[-1]) - seen):
                is_of_other_caller = "." in called and called.partition(".")[0] not in chain  # a lambda
                if is_of_other_caller or others and re.search(others, called):
                    continue
                if called == target:
                    return [*chain, called]
                seen.add(called)
                left.append([*chain, called])
        return None


@functools.lru_cache(1)
def calls_of(text):
    return Calls(text)


def chains(text):
    """{(column, instruction): the chain}."""
    calls, found = calls_of(text), {}
    for column, (kernel, others, targets) in COLUMNS.items():
        for what, way in targets.items():
            chain = [kernel]
            for target in way.split():
                before, chain = chain, calls.extended(chain, target, others)
                if not chain:
                    raise Refused(f"no call in sdpa.cu leads from {before[-1]} to {target}; correct COLUMNS in tools/chains.py")
            found[column, what] = chain
    return found
