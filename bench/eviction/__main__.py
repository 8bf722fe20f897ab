"""`python -m bench.eviction`."""

import sys

from bench.eviction import main

sys.exit(main())
