"""What an extension may import besides the public names: its own value, and a module a part of the house.

base       checks of values, files, settings, the machine
engine     the engine contract, contexts and what they read
decode     steps, what guesses their next tokens, how replies end
llama      llama.cpp's library, its models and their files
libraries  builds of llama.cpp: listed, installed, judged
models     model files: found, read, judged
chat       messages, templates, replies, model families
runtime    runtimes, backends, requests, events
sessions   conversations and their stores
sqlite     the session store of a folder, its files and tables
cache      blocks of state and the tiers that keep them
server     routes, protocols, callers, answers
cli        options and output of commands
testing    the toy engine, for tests

Nothing of the kernel, the server or the command imports these: they are for extensions alone.
"""

from perdure.extension import (
    Extension as Extension,
    ExtensionCommand as ExtensionCommand,
)
