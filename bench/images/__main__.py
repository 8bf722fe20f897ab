"""`python -m bench.images`."""

import sys

from bench.images import main

sys.exit(main())
