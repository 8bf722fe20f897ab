"""HTTP server: OpenAI's routes, routes for sessions, API keys, metrics and logs.

limits           how much one request may ask for, and how long it may take
keys             API keys and their namespaces
api_error        every exception as a status and a body in OpenAI's format
middleware/      access log, host check, API keys, body limits
app_state        what every route needs: the runtime, the caller, work in threads
client_job       work for one client, which ends when the client leaves
sse              a job as server-sent events
metrics          counts and times for Prometheus
recent_requests  the last requests, for the page
schemas/         what is sent and what comes back, and how OpenAPI describes it
protocols/       one folder a protocol that others defined: OpenAI's chat and responses, Anthropic's, Ollama's
routes/          one module a resource: everything else
page/            the page for browsers, built from web/
app              all of it as one ASGI application
http_server      the application on a socket, from its start to its end

A request goes middleware → routes → app_state → client_job; what comes of it goes back the same way.
"""
