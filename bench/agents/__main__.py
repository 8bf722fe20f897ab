"""`python -m bench.agents`."""

import sys

from bench.agents import main

sys.exit(main())
