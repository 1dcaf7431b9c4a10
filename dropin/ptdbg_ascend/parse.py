"""`python -m ptdbg_ascend.parse`, answered by ulpscope."""

import sys

from ulpscope.compat.ptdbg_ascend.shell import main

if __name__ == "__main__":
    sys.exit(main())
