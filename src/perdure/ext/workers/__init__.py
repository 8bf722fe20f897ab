"""The engine in a supervised child process, and in another process that has the store.

protocol          the messages between the two processes
connection        messages over a socket, whole and in order
message_reader    reads them, in a thread or an event loop
service           the requests and calls of one connection, served by a backend
child             the process with the engine
process           one such process, from its start to its end
supervisor        keeps one running: restarts, back-off, hangs, memory
deadly_files      files that ended the process that loaded them, which are not loaded the same way again
pending_requests  requests and calls that are not answered yet, over all their tries
remote            all of it behind the protocol of a backend; tokenizer and prefix cache, asked of the child
guest             another process that uses the engine of this one's store
attached          the other side of that: a backend on the engine of another process

A request goes remote → pending_requests → connection → child; what comes of it goes back child → connection →
message_reader → supervisor → pending_requests.
"""

from perdure.spi import Extension

EXTENSION = Extension(
    name="workers",
    parts={
        "isolated": "perdure.ext.workers.remote:RemoteBackend",
        "store of another process": "perdure.ext.workers.attached:lock_or_attach",
        "guests of a store": "perdure.ext.workers.guest:Guest",
    },
)
