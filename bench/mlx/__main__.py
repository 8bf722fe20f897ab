"""`python -m bench.mlx`."""

import sys

from bench.mlx import main

sys.exit(main())
