#!/usr/bin/env python3
"""The reference document's own command line, from any folder, installed or not. Needs the standard library.

python3 pd_ranktable_tools.py --mode gen --prefill-server-list 4,5 --decode-server-list 6,7 --api-server \
    --save-dir ./save_dir
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ranktable_tools.cli import reference_main

if __name__ == "__main__":
    sys.exit(reference_main())
