"""Chats of other programs as sessions: the exports of ChatGPT, Claude and Open WebUI.

chat         a chat as a tree of messages, and its branches as turns
chatgpt, claude, open_webui   what each program writes
export_file  the chats of a file, one after the other, with bounds
importing    sessions made of chats
routes       `/v1/chats/import`
commands     `perdure sessions import-chats`
"""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="chat_imports",
    routes=("perdure.ext.chat_imports.routes:router",),
    uploads=("/v1/chats/import",),
    commands=(
        ExtensionCommand(
            name="import-chats", target="perdure.ext.chat_imports.commands:import_chats", below="sessions"
        ),
    ),
)
