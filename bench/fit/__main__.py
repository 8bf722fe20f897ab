import sys

from bench.fit import main

if __name__ == "__main__":
    sys.exit(main())
