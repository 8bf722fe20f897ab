"""`python -m bench.fairness`."""

import sys

from bench.fairness import main

sys.exit(main())
