import sys

from bench.packing import main

if __name__ == "__main__":
    sys.exit(main())
