"""Write a small store, exports and a backup of it by the perdure on the path: `python make.py FOLDER`."""

import importlib
import sys
from pathlib import Path
from typing import Any

import perdure
from perdure.sessions.responses import respond

folder = Path(sys.argv[1])


def found(*modules: str) -> Any:
    """The first of these modules that this version has."""
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
    return None


toy = found("perdure.testing.toy", "perdure.engine.toy")
backup = found(
    "perdure.ext.upkeep.backup",
    "perdure.sessions.store.sqlite.backup",
    "perdure.sessions.storage.backup",
)
streams = found("perdure.server.core.event_log")
template = folder / "chat.jinja"
template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
settings: Any = {"n_ctx": 512, "slots": 1, "threads": 1, "template": template}
with perdure.open(toy.ToyModel(), store=folder / "store", **settings) as rt:
    alice = rt.session("alice", system="Be terse.", seed=3)
    alice.say("Hello", max_tokens=4)
    alice.label("greeting", note="how it began")
    alice.say("And then?", max_tokens=4)
    # Names that were let through for a while.
    for name in ("alice/b", "alice-b"):
        try:
            alice.fork(name, turn=1).say("Or else?", max_tokens=4)
            break
        except perdure.InvalidInputError:
            continue
    try:
        rt.session("..")
    except perdure.InvalidInputError:
        rt.session("empty")
    if hasattr(streams, "write_record"):
        about = {"how": "chat", "request": {"messages": [{"role": "user", "content": "Hi"}]}, "seed": 7}
        streams.write_record(rt.sessions, "", "chatcmpl-1", about, seconds=60)
    if hasattr(rt.sessions, "respond"):
        respond(rt.sessions, "resp_1", {"how": "response"}, after=alice).say("Again?", max_tokens=4)
    alice.export(folder / "alice.perdure")
    alice.export(folder / "words.perdure", state=False)
if backup is not None:
    backup.back_up(folder / "store", folder / "store.backup", state=True)
