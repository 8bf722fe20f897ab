"""What can be asked for over HTTP, one module a resource. Chat is in `protocols/`, a folder a protocol."""
