"""Middleware: what a request passes before it reaches a route.

access_log    one log line and one count for every request
host_check    requests that a page of another site makes
auth          API keys
body_limits   bodies that are too large, too slow, too deep, or of the wrong type
"""
