"""`python -m ulpscope.compat.msprobe -f pytorch compare ...`"""

import sys

from ulpscope.compat.msprobe.command import main

sys.exit(main())
