"""Removes from the comments of an extract what they say about code that it does not contain. Used by tools/extract.py.

A sentence is removed if it names an option that is off in the line, or an identifier of sdpa.cu that the extract lacks.
"USE_X: " and "With USE_X, " are removed from the start of a sentence if USE_X is on. Rows of tables and drawings are
treated as sentences.
"""
import collections
import re
import textwrap

from minimal import BANNERS, WIDTH

# Words that look like an identifier: CUDA's spelling of types, names with underscores, capitals, "name()".
IDENTIFIER = re.compile(r"\b(?:\w*[a-z0-9]_\w+|[A-Z][A-Z0-9_]+|[A-Z]\w*[a-z]\w*[A-Z]\w*|[a-z]+\d+[a-z]\d*|bf16|fp16|\w+(?=\(\)))")
# The names of types in comments.
SPELLED = {"__half": "fp16 FP16", "__nv_bfloat16": "bf16 BF16", "__nv_fp8_e4m3": "e4m3 FP8_E4M3", "e4m3": "e4m3",
           "uint8_t": "u8 U8"}


# Words about several kernels, or about a part of sdpa.cu.
OF_SEVERAL = r"\bkernel famil|\b(?:scalar|w?mma|wgmma) famil|\b(?:[Ee]very|[Aa]ll|[Mm]ost) kernels?\b|\bIn this template|\bCPU backend|\bsection \d"
# Words about instructions, and what the code has if it uses these.
INSTRUCTIONS = {r"\bTMA\b": r"CUtensorMap|cp_async_bulk", r"\bcp\.async": r"cp_async", r"griddepcontrol": "griddepcontrol",
                r"\bwgmma\b": "wgmma_", r"\bmma\.sync\b": r"\bmma_m16", r"[Pp]roxy": "fence_proxy"}
# A knob: its member of the builds, its value as text or None if the builds differ, and whether it is on.
Setting = collections.namedtuple("Setting", "member value is_on")


def code_of(text):
    """A text without comments and strings."""
    return re.sub(r'//.*|"(?:[^"\\\n]|\\.)*"', " ", text)


class Comments:
    """knobs: {name: Setting}. words: patterns for options that are off."""

    def __init__(self, text, sdpa, knobs, words):
        code = {*re.findall(r"\w+", code_of(text))}
        spelled = {word for name in code & SPELLED.keys() for word in SPELLED[name].split()}
        self.absent = {*re.findall(r"\w+", code_of(sdpa)), *knobs} - code - spelled
        absent = [word for word, of in INSTRUCTIONS.items() if not re.search(of, code_of(text))]
        self.knobs, self.words = knobs, re.compile("|".join([*words, *absent, OF_SEVERAL]))
        self.members = {name: knob.member for name, knob in knobs.items() if name not in code and knob.value is None}
        names = "|".join(sorted(knobs, key=len, reverse=True))
        one = rf"(?:{names})(?:=\w+)?"
        self.condition = re.compile(rf"(?:With |with |\()?({one}(?:(?:, | or | and )(?:{one}|\d))*)(?:[:,)] )")
        self.parts = re.compile(rf"({names})(?:=(\w+))?")

    def names_absent(self, words):
        return self.words.search(words) or any(name in self.absent for name in IDENTIFIER.findall(words))

    def is_on(self, condition):
        """True if a line meets one of the conditions, False if none; None if it depends on the row of the table."""
        met = [None if self.knobs[knob].value is None else self.knobs[knob].value == value if value else self.knobs[knob].is_on
               for knob, value in self.parts.findall(condition)]
        return True if True in met else None if None in met else False

    def sentence(self, words):
        """Returns the rest of a sentence, or of a row of a table, for the knobs of this line."""
        found = self.condition.match(words)
        if found and self.is_on(found[1]) is not None:
            if not self.is_on(found[1]):
                return ""
            rest = words[found.end():]
            words = rest[0].upper() + rest[1:] if self.is_prose else rest
        words = re.sub(r" \(([A-Z_0-9]+)\)", lambda m: "" if m[1] in self.knobs and self.is_on(m[1]) else m[0], words)
        words = self.parts.sub(lambda m: m[0].replace(m[1], self.members.get(m[1], m[1])).replace("=", " = ")
                               if m[1] in self.members else m[0], words)
        if not self.names_absent(words):
            return words
        # Part of a sentence: "x, or with USE_Y z" is x.
        clause = re.sub(r",? (?:or|and) (?:with )?(?:(?! (?:or|and) )[^,.;:])*", lambda m: "" if self.names_absent(m[0]) else m[0], words)
        return clause if clause != words and not self.names_absent(clause) and re.search(r"\w", clause) else ""

    def prose(self, words, is_prose):
        """The sentences of a comment that stay."""
        self.is_prose = is_prose
        parts = re.split(r"(?<=[.;])\s+", words)
        kept, gone = [], ""
        for part in parts:
            own = self.sentence(part)
            if not own or gone.endswith(";") and re.match("(?:this|it|they) ", own):  # "x; this is y" is removed with x
                gone = part
                if part.endswith(".") and kept:
                    kept[-1] = re.sub(";$", ".", kept[-1])
            else:
                kept, gone = [*kept, own], ""
        if kept == parts:
            return words
        out = " ".join(kept)
        return (re.sub(r";$", ".", out) if words.endswith(".") else re.sub(r"[.;]$", "", out)) if out else ""

    def block(self, lines, width):
        """A comment of several lines, in paragraphs of prose, tables and drawings."""
        out = []
        for paragraph in re.split(r"^\n", "".join(f"{line}\n" for line in lines), flags=re.MULTILINE):
            own = paragraph.splitlines()
            if any(re.search(r"\S {3,}\S|^ ", line) for line in own):
                own = self.table(own)
            elif own:
                kept = self.prose(" ".join(own), True)
                own = own if kept == " ".join(own) else textwrap.wrap(kept, width)
            out += ([""] if out and own else []) + own
        return out

    def table(self, lines):
        """A table without the rows that name what is absent. A row continues in lines that are indented deeper."""
        self.is_prose = False
        least = min(len(line) - len(line.lstrip()) for line in lines)
        rows = []
        for line in lines:
            if rows and len(line) - len(line.lstrip()) > least:
                rows[-1].append(line)
            else:
                rows.append([line])
        rows = [[line if not self.names_absent(line) else re.sub(r"; with .*", "", line) for line in row] for row in rows]
        return [line for row in rows if not self.names_absent(" ".join(row)) for line in row]

    def cleaned(self, text):
        lines, out = text.split("\n"), []
        while lines:
            indent = re.match(r" *(?=//( |$))", lines[0])
            is_own = indent and not lines[0].startswith(BANNERS)
            n = next((n for n, line in enumerate(lines) if not re.match(rf"{indent[0]}//( |$)", line) or
                      line.startswith(BANNERS)), len(lines)) if is_own else 0
            if n:
                block = self.block([line[len(indent[0]) + 3:] for line in lines[:n]], WIDTH - len(indent[0]) - 3)
                out += [f"{indent[0]}// {line}".rstrip() for line in block]
            else:
                behind = re.match(r"(.*?[^\s/].*?)(\s+// )(?!clang-format)(.*)$", lines[0])
                kept = behind and self.prose(behind[3], False)
                out.append(lines[0] if not behind or kept == behind[3] else behind[1] + (behind[2] + kept if kept else ""))
            lines = lines[n or 1:]
        return "\n".join(out)
