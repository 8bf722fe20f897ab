"""`python -m bench.protocols`."""

import sys

from bench.protocols import main

sys.exit(main())
