"""`python -m bench.adapters`."""

import sys

from bench.adapters import main

sys.exit(main())
