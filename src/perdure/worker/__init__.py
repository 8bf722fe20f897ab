"""The engine in a supervised child process.

messages     what the two processes say to each other
wire         messages over a socket, whole and in order
child        the process with the engine
process      one such process, from its start to its end
care         how the process is looked after
supervisor   keeps one running: restarts, back-off, hangs, memory
flight       one request on its way, over all its tries
desk         everything that was asked and is not answered yet
vocabulary   text and tokens, asked of the child
remote       all of it behind the protocol of a backend

What was asked goes remote → desk → wire → child; what comes of it goes back child → wire → supervisor → desk.
"""
