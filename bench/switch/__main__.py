"""`python -m bench.switch`."""

import sys

from bench.switch import main

sys.exit(main())
