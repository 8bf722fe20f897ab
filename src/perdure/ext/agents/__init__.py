"""Agents: their conversations are sessions, their prompts stay stable, and commands start and explain them.

named_conversations  the next turn of a conversation that a client names is one of a session
conversation_names   how clients name their conversations, in headers and fields
agent_conversation   the session of a client that sends its whole history with every request
prompt_rule          what is known of their prompts: volatile_text, side_requests
prompt_heads         what their prompts begin with, over a restart
launch, mcp, why     the commands
"""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="agents",
    prompt_rules=("perdure.ext.agents.prompt_rule:AgentPrompts",),
    conversations=("perdure.ext.agents.named_conversations:CONVERSATIONS",),
    services=("perdure.ext.agents.prompt_heads:WARM_START",),
    commands=(
        ExtensionCommand(
            name="launch",
            target="perdure.ext.agents.launch:launch",
            section="Serve a model",
            settings={"options_metavar": "[OPTIONS]", "context_settings": {"allow_extra_args": True}},
        ),
        ExtensionCommand(name="why", target="perdure.ext.agents.why:why", section="Serve a model"),
        ExtensionCommand(name="report", target="perdure.ext.agents.why:report", section="Serve a model"),
        ExtensionCommand(name="mcp", target="perdure.ext.agents.mcp:mcp", section="Serve a model"),
    ),
)
