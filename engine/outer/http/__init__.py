"""Transport of the outer loop: a store as an HTTP server, and the connection of one rank to one or several stores.

    values        messages as JSON, read strictly into their dataclasses
    bodies        frames, hashes, bodies that arrive in ranges
    requests      paths, and requests that are no messages of the outer loop
    server        routes over a store
    service       process of a store: socket, signals, ticks
    connection    requests of one rank to one store, repeated until it answers
    line          interface of stores for one rank, over connections
    open_link     connections of a rank by its configuration

The server needs starlette and uvicorn, and a site needs httpx: the extra ``trine[outer]``.
"""
