"""`python -m bench.resume`; with `llama-server`, the process of the peer."""

import sys

from bench.child import serve
from bench.resume import LlamaServer, main

if sys.argv[1:] == ["llama-server"]:
    serve({"open": LlamaServer().open})
else:
    sys.exit(main())
