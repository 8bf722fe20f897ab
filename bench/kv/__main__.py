import sys

from bench.kv import main

if __name__ == "__main__":
    sys.exit(main())
