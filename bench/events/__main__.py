"""`python -m bench.events`."""

import sys

from bench.events import main

sys.exit(main())
