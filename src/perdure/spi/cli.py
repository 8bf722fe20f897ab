"""For extensions of the command: options, output and what a command opens."""

from perdure.cli.commands.background import current, private
from perdure.cli.commands.sessions import awake, figures, memory_facts
from perdure.cli.options import groups, shared
from perdure.cli.options.shared import (
    AfterAddress,
    Json,
    Limit,
    Namespace,
    StoreFolder,
    Yes,
    model_names,
    model_option,
    session_names,
)
from perdure.cli.output import terminal, words
from perdure.cli.output.facts import print_json, tell
from perdure.cli.output.progress import fetching, file_of, working
from perdure.cli.output.terminal import note, write, write_columns
from perdure.cli.prompt import standard_input
from perdure.cli.runtime import keys_in, opened, session_folder, sessions_in, shared_keys, usual_store
from perdure.cli.server_client import Key, Url, ask, server_url

__all__ = [
    "AfterAddress",
    "Json",
    "Key",
    "Limit",
    "Namespace",
    "StoreFolder",
    "Url",
    "Yes",
    "ask",
    "awake",
    "current",
    "fetching",
    "figures",
    "file_of",
    "groups",
    "keys_in",
    "memory_facts",
    "model_names",
    "model_option",
    "note",
    "opened",
    "print_json",
    "private",
    "server_url",
    "session_folder",
    "session_names",
    "sessions_in",
    "shared",
    "shared_keys",
    "standard_input",
    "tell",
    "terminal",
    "usual_store",
    "words",
    "working",
    "write",
    "write_columns",
]
