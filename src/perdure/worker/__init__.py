"""The engine in a supervised child process.

protocol          the messages between the two processes
connection        messages over a socket, whole and in order
message_reader    reads them, in a thread or an event loop
service           the requests and calls of one connection, served by a backend
child             the process with the engine
process           one such process, from its start to its end
restart_policy    when it is started again
supervisor        keeps one running: restarts, back-off, hangs, memory
pending_requests  requests and calls that are not answered yet, over all their tries
remote            all of it behind the protocol of a backend; tokenizer and prefix cache, asked of the child
listener          serves the engine of a store to other processes that use the store
attached          the other side of that: a backend on the engine of another process

A request goes remote → pending_requests → connection → child; what comes of it goes back child → connection →
message_reader → supervisor → pending_requests.
"""
