"""`python -m bench.settling`."""

import sys

from bench.settling import main

sys.exit(main())
