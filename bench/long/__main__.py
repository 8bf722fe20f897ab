import sys

from bench.long import main

if __name__ == "__main__":
    sys.exit(main())
