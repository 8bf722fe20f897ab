"""Images and sounds of messages, besides reading them."""
