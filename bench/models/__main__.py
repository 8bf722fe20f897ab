import sys

from bench.models import main

if __name__ == "__main__":
    sys.exit(main())
