"""Regular expressions in schemas: what a grammar can follow, and how large they are."""

import re

# An escape, a class, a quantifier with a number, or one character.
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<exactly>[0-9]+)(?:,(?P<most>[0-9]*))?\}|.", re.DOTALL
)
_MAX_DIGITS = 9  # more make a number that is too large anyway

# Lookaround, atomic groups, flags, names; word borders, back references, Unicode classes, absolute anchors,
# escapes whose meaning differs between dialects; counts with no lower bound; a quantifier on a quantifier.
_BEYOND_GRAMMARS = re.compile(
    r"\(\?(?!:)|\\[bBpPkAzZGhHRNXQEeac0-9]|\{(?![0-9]+(?:,[0-9]*)?\})|\[\^?\]|[*+?}][*+]|&&|--|~~|\[:"
)
_ANY_CHARS = ".*"  # to a grammar: any but quotes, backslashes and control characters


def fits_grammars(pattern: str) -> bool:
    """Whether grammar compilers follow a pattern; some refuse the rest, some pass over it in silence."""
    escapes_apart = pattern.replace(r"\\", "__")
    return not _BEYOND_GRAMMARS.search(escapes_apart) and _anchors_stand_at_the_ends(escapes_apart)


def anchored(pattern: str) -> str:
    """Return a pattern for compilers that match all of a string, where JSON Schema looks for any part of it.

    One that is anchored at neither end stays: most of those mean the whole. One that is anchored at one end
    says that the other is open.
    """
    escapes_apart = pattern.replace(r"\\", "__")
    starts = escapes_apart.startswith("^")
    ends = escapes_apart.endswith("$") and not escapes_apart.endswith(r"\$")
    if starts == ends:
        return pattern
    if starts:
        return pattern if pattern.endswith(".*") else pattern + _ANY_CHARS + "$"
    return pattern if pattern.startswith(".*") else "^" + _ANY_CHARS + pattern


def written_out_chars(pattern: str) -> int:
    """How many atoms a pattern has when `x{2,5}` is written out as five; roughly, and quickly."""
    groups = [0]  # atoms of each open group
    last = 0  # of what a quantifier would repeat
    for token in _TOKEN.finditer(pattern):
        times = token["most"] or token["exactly"]
        if times:
            more = last * (int(times[:_MAX_DIGITS]) - 1)
            groups[-1], last = groups[-1] + max(0, more), last + max(0, more)
        elif token[0] == "(":
            groups.append(0)
        elif token[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            groups[-1] += 1
            last = 1
    return sum(groups)


def _anchors_stand_at_the_ends(pattern: str) -> bool:
    """Whether `^` and `$` stand at the very ends only, and say the same for every alternative."""
    pieces = [match[0] for match in _TOKEN.finditer(pattern)]
    has_anchor = pieces[:1] == ["^"] or pieces[-1:] == ["$"]
    depth = 0
    for position, piece in enumerate(pieces):
        if (piece == "^" and position > 0) or (piece == "$" and position < len(pieces) - 1):
            return False
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0 and has_anchor:
            return False
    return True
