"""What can be asked for over HTTP, one module a resource."""
