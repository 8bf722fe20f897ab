"""Reading what llama.cpp computes: keys and values as numbers, and traces of a pass."""
