"""`perdure quantize`, `compare`, `fuse`, `merge` and `convert`: model files made from others."""
