import sys

from bench.speculation import main

if __name__ == "__main__":
    sys.exit(main())
