"""The gateway: model calls of any client over HTTP, recorded as one tree of turns per episode.

A training opens a session for each rollout and gives its agent the address:

    sessions = Sessions()
    gateway = Gateway(sessions, OneModel(policy, "policy"), chat)
    async with listening(gateway.app, "127.0.0.1", 0) as address:
        session = sessions.open(Session(new_key(), chat, policy, sampling, limits))
        ...                                    # the agent calls f"{address}/e/{session.key}/v1"
        trace = await sessions.end(session.key)  # turns with parents, tokens, drift, counts

`dialects/` reads and writes the wire formats, `tree.py` matches a request's messages against the recorded turns,
`session.py` is one episode being recorded, `sessions.py` all of them, `app.py` the HTTP side.
"""
