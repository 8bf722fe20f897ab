"""`python -m bench.patience`."""

import sys

from bench.patience import main

sys.exit(main())
