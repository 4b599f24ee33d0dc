#!/usr/bin/env python3
"""The command line of the reference document. Works from any folder, without an installation.

Needs only Python 3.8 or newer; an older Python gets an error message.

python3 pd_ranktable_tools.py --mode gen --prefill-server-list 4,5 --decode-server-list 6,7 --api-server \
    --save-dir ./save_dir
"""

import os
import sys

if sys.version_info < (3, 8):
    sys.exit("pd_ranktable_tools.py: needs Python 3.8 or newer, and this is " + sys.version.split()[0])

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from ranktable_tools.cli import reference_main

if __name__ == "__main__":
    sys.exit(reference_main())
