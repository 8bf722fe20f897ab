"""Benchmarks. `python -m bench` runs all of them, `python -m bench.NAME` one.

machine   what the machine did besides
harness   figures, targets, how they are measured and reported
child     a process that takes measurements on request
loops     the loops that such processes run: ours, the engine's bare calls, llama-cpp-python
streams   replies being written, in such processes: ours, a bare batched loop, llama-cpp-python
engine    the ground floor against both
decode    the decode loop against both
"""
