"""OpenAI's Responses. A stored response is a turn of a session."""
