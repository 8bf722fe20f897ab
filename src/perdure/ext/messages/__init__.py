"""Anthropic's Messages.

requests  what clients ask, read into a `ReplyRequest`
answers   replies, streams and errors in its shapes, and its routes
"""

from perdure.spi import Extension

EXTENSION = Extension(name="messages", protocols=("perdure.ext.messages.answers:PROTOCOL",))
