"""The rule for names of models and adapters, which people read in lists, logs, metrics and pages.

Names of tenants, keys, instances and nodes have ASCII letters and digits only, by patterns of their own.
"""

from __future__ import annotations

import unicodedata

# Characters without a shape of their own that Unicode calls letters, marks or symbols: joiners, fillers, variation
# selectors, an empty pattern of Braille (Default_Ignorable_Code_Point in Unicode 15.1's DerivedCoreProperties.txt).
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
    """Returns why a name would mislead its readers; "" if it would not.

    Refused: control and format characters (among them all that change the direction of text), line separators, spaces
    other than " ", private, unassigned and half characters, characters without a shape, a space at either end, and a
    composed character in parts (Unicode's NFC), which looks like another name. Letters of all scripts are fine.
    """
    for char in name:
        if not char.isprintable() or char in _UNSEEN:
            known = unicodedata.name(char, "")
            return f"has U+{ord(char):04X}{f' ({known})' if known else ''}, which readers do not see as what it is"
    if name != name.strip():
        return "begins or ends with a space"
    composed = unicodedata.normalize("NFC", name)
    return "" if name == composed else f"looks like {composed}, which is another name; give that one"
