"""Checks names of models and adapters, which people read in lists, logs, metrics and pages.

Names of tenants, keys, instances and nodes are limited to ASCII letters, digits and a few signs elsewhere.
"""

from __future__ import annotations

import unicodedata

# Characters without a visible shape that Unicode classes as letters, marks or symbols: joiners, fillers, variation
# selectors, an empty Braille pattern (Default_Ignorable_Code_Point in Unicode 15.1's DerivedCoreProperties.txt).
_UNSEEN = frozenset(
    chr(at)
    for first, last in (
        (0x034F, 0x034F),
        (0x115F, 0x1160),
        (0x17B4, 0x17B5),
        (0x180B, 0x180F),
        (0x2800, 0x2800),
        (0x3164, 0x3164),
        (0xFE00, 0xFE0F),
        (0xFFA0, 0xFFA0),
        (0xE0100, 0xE01EF),
    )
    for at in range(first, last + 1)
)


def fault_of_name(name: str) -> str:
    """Returns why a name would mislead its readers, or "".

    Letters of all scripts are accepted. These are refused:

    - control and format characters, including all that change the direction of text, and line separators
    - private, unassigned and surrogate characters, and characters without a visible shape
    - spaces other than " ", and a space at either end
    - decomposed characters (not Unicode's NFC), which look like another name
    """
    for char in name:
        if not char.isprintable() or char in _UNSEEN:
            known = unicodedata.name(char, "")
            return f"has U+{ord(char):04X}{f' ({known})' if known else ''}, which readers cannot recognize"
    if name != name.strip():
        return "begins or ends with a space"
    composed = unicodedata.normalize("NFC", name)
    return "" if name == composed else f"looks like {composed}, but is another name; use that one"
