"""For extensions of the command: options, output and what a command opens."""

from perdure.cli.commands.background import current as current, private as private
from perdure.cli.commands.sessions import (
    awake as awake,
    figures as figures,
    memory_facts as memory_facts,
)
from perdure.cli.options import groups as groups, shared as shared
from perdure.cli.options.shared import (
    AfterAddress as AfterAddress,
    Json as Json,
    Limit as Limit,
    Namespace as Namespace,
    StoreFolder as StoreFolder,
    Yes as Yes,
    model_names as model_names,
    model_option as model_option,
    session_names as session_names,
)
from perdure.cli.output import terminal as terminal, words as words
from perdure.cli.output.facts import print_json as print_json, tell as tell
from perdure.cli.output.progress import (
    fetching as fetching,
    file_of as file_of,
    working as working,
)
from perdure.cli.output.terminal import (
    note as note,
    write as write,
    write_columns as write_columns,
)
from perdure.cli.prompt import standard_input as standard_input
from perdure.cli.runtime import (
    keys_in as keys_in,
    opened as opened,
    session_folder as session_folder,
    sessions_in as sessions_in,
    shared_keys as shared_keys,
    usual_store as usual_store,
)
from perdure.cli.server_client import (
    Key as Key,
    Url as Url,
    ask as ask,
    server_url as server_url,
)
