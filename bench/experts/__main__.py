import sys

from bench.experts import main

if __name__ == "__main__":
    sys.exit(main())
