"""Replicas of a server on several machines under Ray Serve: which of them answers what, how many there are,
and how one takes its leave.

    policy       which replica answers: by the time until its first token, of facts that replicas report
    marks        what a request says about where its state is, out of its headers and its body
    config       the file that `perdure cluster serve` reads
    replica      a runtime and its routes, without a socket
    application  all of it as an application of Ray Serve: `application({"config": FILE})`

Only `application` needs Ray (`pip install 'perdure[server,cluster,ray]'`).
"""
