"""Optional parts, one folder each. The core imports none of them: `extra_table.py` names what each plugs in."""
