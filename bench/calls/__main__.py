"""`python -m bench.calls`."""

import sys

from bench.calls import main

sys.exit(main())
