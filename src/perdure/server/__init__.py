"""HTTP server: protocols that clients speak, our own routes, API keys, metrics, logs and the page.

pool/        several models of one process, loaded when they are asked for
core/        what every route needs; imports nothing but the pool of the others
    protocol         a protocol as a value, and the events that its streams are made of
    follow           the one consumer of a stream: events to a client, usage to its key
    app_state        the runtime, the caller, work in threads
    reasoning_cipher texts that clients carry and cannot read
    visit            the models that one request uses, and signs of life while it waits for them
    settings         limits, reply defaults, what can change while the server runs
    keys             API keys and their namespaces
    body_route       large bodies, read in a thread
    api_error        every exception as a status and a body
    schemas          what is common to requests and answers, and how OpenAPI describes them
    middleware       access log, host check and CORS, API keys, body limits
    metrics          counts and times for Prometheus; the last requests, for the page
protocols/   protocols that others defined: chat completions, Messages; extensions bring more
api/         our own routes: sessions, memories, the cache, models, embeddings, operation, the page
page/        the page for browsers, built from web/
app          all of it as one ASGI application
direct_write the fast path of a token to a socket
http_server  the application on a socket, from its start to its end

A request goes middleware → route → runtime or session; a `Follower` reads what comes of it.
"""
