"""Names of hosts: the one spelling that rules, questions of programs and connections are compared by."""

from __future__ import annotations

from stockade.policy.net_errors import NetRuleError

MOST_NAME = 253
MOST_LABEL = 63
#: The name of a rule for every host; no host is called so.
ANY_HOST = "*"
#: What to do about a rule for several hosts.
ONE_HOST = "write one rule for each host"
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")
_DIGITS = frozenset("0123456789")
_HEX_DIGITS = frozenset("0123456789abcdef")
#: Dots of other scripts, which some programs take for a dot.
_OTHER_DOTS = ("\u3002", "\uff0e", "\uff61")
#: IDNA of 2003 and of 2008 read these in different ways.
_AMBIGUOUS = ("\u00df", "\u03c2", "\u200c", "\u200d")


def normal_name(text: str) -> str:
    """Return the one spelling of a host's name: A-labels, lower case, no dot at the end.

    >>> normal_name("Bücher.Example.")
    'xn--bcher-kva.example'
    """
    if not text:
        raise NetRuleError("the name is empty", "write a host such as api.example.com")
    if len(text) > MOST_NAME + 1:
        raise NetRuleError(f"the name is longer than {MOST_NAME} characters")
    for dot in _OTHER_DOTS:
        if dot in text:
            raise NetRuleError(f"the name has U+{ord(dot):04X} for a dot", f"write {text.replace(dot, '.')}")
    labels = text.removesuffix(".").split(".")
    name = ".".join([_label(label) for label in labels])
    if len(name) > MOST_NAME:
        raise NetRuleError(f"the name is longer than {MOST_NAME} characters")
    if is_number(name.rpartition(".")[2]):
        raise NetRuleError(
            "is neither a name nor an address in its usual form",
            "write an address as four numbers: 127.0.0.1",
        )
    return name


def _label(label: str) -> str:
    plain = label.lower() if label.isascii() else _a_label(label)
    if plain and _LETTERS.issuperset(plain) and "-" not in (plain[0], plain[-1]) and len(plain) <= MOST_LABEL:
        return plain
    if not label:
        raise NetRuleError("the name has an empty part", "write one dot between two parts of a name")
    if len(plain) > MOST_LABEL:
        raise NetRuleError(f"a part of the name is longer than {MOST_LABEL} characters")
    if "*" in label:
        raise NetRuleError(
            "a * stands only for whole names before a host", "write *.example.com, or name each host"
        )
    if "-" in (plain[0], plain[-1]):
        raise NetRuleError("a part of the name begins or ends with -")
    wrong = next(letter for letter in plain if letter not in _LETTERS)
    hint = ONE_HOST if wrong in ",;" else "write a host such as api.example.com"
    raise NetRuleError(f"a name cannot contain {character_name(wrong)}", hint)


def is_number(text: str) -> bool:
    """Whether programs take it for a number, as a part of an address: 127, 0x7f."""
    if text.startswith("0x"):
        return _HEX_DIGITS.issuperset(text[2:])
    return bool(text) and _DIGITS.issuperset(text)


def character_name(letter: str) -> str:
    """Return a character as an error message shows it."""
    names = {" ": "a space", "\0": "a NUL byte", "\t": "a tab", "\n": "a line break"}
    return names.get(letter) or (repr(letter) if letter.isprintable() else f"U+{ord(letter):04X}")


def _a_label(label: str) -> str:
    """Return the A-label of a label with letters beyond ASCII."""
    if len(label) > MOST_LABEL:
        raise NetRuleError(f"a part of the name is longer than {MOST_LABEL} characters")
    hint = "write the name in its ASCII form, which begins with xn--"
    for letter in label:
        if letter in _AMBIGUOUS:
            raise NetRuleError(f"standards disagree about U+{ord(letter):04X} in a name", hint)
    import unicodedata
    from encodings import idna  # 4 ms, so only for such a name

    try:
        found = idna.ToASCII(label).decode("ascii").lower()
        same = idna.ToUnicode(found) == unicodedata.normalize("NFC", label.lower())
    except UnicodeError:
        raise NetRuleError("the name has letters that no host name can have", hint) from None
    if not found.startswith("xn--") or not same:
        # Wide letters, ligatures and the like: what it says is not what a program would look up.
        raise NetRuleError("the name has letters that stand for others", f"write {found} for {label}")
    return found
