"""Optional parts, one folder each. The core imports none of them; `extra_table.py` lists what each adds to it."""
