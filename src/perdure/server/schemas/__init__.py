"""What is sent and what comes back, one module a resource."""
