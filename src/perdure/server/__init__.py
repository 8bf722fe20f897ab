"""HTTP: OpenAI's routes, sessions as resources, keys, figures and logs.

limits      how much anybody may ask for, and how long it may take
keys        who may come in, and whose namespace that is
refusal     errors as HTTP tells them, in OpenAI's shape
middleware/ access log, host check, API keys, body limits: what a request passes before its route
desk        what every route needs: the runtime, who asks, work in threads
visit       one job for one client, who may leave
stream      a job as server-sent events
figures     what happens, for Prometheus
shapes/     what is sent and what comes back
routes/     one module a resource
app         all of it as one ASGI application
listener    the application on a socket, from its start to its end

A request goes middleware → routes → desk → visit; what comes of it goes back the same way.
"""
