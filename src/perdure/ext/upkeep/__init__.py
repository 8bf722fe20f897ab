"""Upkeep of sessions and stores: exported, verified, repaired, backed up, migrated; and what is cached.

store      what the commands call, for a folder and for a database on a server
repair     every turn and every block proved; what can be proved of a damaged database, in a new one
backup     a store in one file, taken while it is in use, and a store made of such a file
migration  all sessions of a store brought into another one, while both are in use
archive_file  plain files in one tar, each with a digest: exports and backups
export     a session as one file that can be moved
importing  what is taken of such a file, and what is left out
moving     `perdure sessions export`, `import`
memories   `perdure sessions memories`: labelled points of sessions
commands   `perdure backup`, `restore`, `sessions verify`, `sessions migrate`
cache      `perdure cache`: computed state listed, warmed, cleared, verified
"""

from perdure.spi import Extension, ExtensionCommand

_COMMANDS = "perdure.ext.upkeep.commands"

EXTENSION = Extension(
    name="upkeep",
    parts={
        "session.export": "perdure.ext.upkeep.export:write_export",
        "sessions.import_": "perdure.ext.upkeep.importing:import_session",
        "manifest of an export": "perdure.ext.upkeep.export:manifest_of",
    },
    commands=(
        ExtensionCommand(name="backup", target=f"{_COMMANDS}:backup", section="What is kept"),
        ExtensionCommand(name="restore", target=f"{_COMMANDS}:restore", section="What is kept"),
        ExtensionCommand(name="cache", target="perdure.ext.upkeep.cache:app", section="What is kept"),
        ExtensionCommand(name="export", target="perdure.ext.upkeep.moving:export", below="sessions"),
        ExtensionCommand(name="import", target="perdure.ext.upkeep.moving:import_", below="sessions"),
        ExtensionCommand(name="memories", target="perdure.ext.upkeep.memories:app", below="sessions"),
        ExtensionCommand(name="verify", target=f"{_COMMANDS}:verify", below="sessions"),
        ExtensionCommand(name="migrate", target=f"{_COMMANDS}:migrate", below="sessions"),
    ),
)
