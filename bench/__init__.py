"""Benchmarks. `python -m bench` runs all of them, `python -m bench.NAME` one.

machine   what the machine did besides
harness   figures, targets, how they are measured and reported
child     a process that takes measurements on request
loops     the loops that such processes run: ours, the engine's bare calls, llama-cpp-python
sampling  a row of logits, drawn from by ours and by the library
library_sampler  the chain of samplers that the library has
streams   replies being written, in such processes: ours, a bare batched loop, llama-cpp-python
engine    the ground floor against both
decode    the decode loop against both
conversations  conversations being carried on, in such processes: ours, a floor, both peers
turns     the last turn of many conversations, against all of them
reuse     moving state against computing it
sleepers  conversations that sleep on the disk, in such processes
wake      waking one, keeping many
talkers   chats in messages, in such processes
servers   servers in processes of their own, one client for all, and their builds bare
foreign   the build of llama.cpp that llama-server has, called like ours
serve     the server against the library and both peers
gpu       a GPU: replies, state, long prompts and the server, against the library alone
device    state and long prompts on it, in such processes
random_model  models of random weights, for speed
page      first paint, frames while a reply streams, size of the scripts
calls     tokens of a reply whose calls are held to their tools
chat      what of a chat is computed again, and what a turn costs besides
growing/  what growth measures, a module for each layer
growth    what each operation costs when a hundred times as much is there
"""
