"""HTTP servers of this process: sockets, uvicorn in a thread, JSON without surprises.

json_text   JSON objects with unique keys; floats that are not finite become text
sockets     listening sockets and their addresses
hosted      uvicorn around an application, in the event loop of the caller or in a thread

``sockets`` and ``json_text`` need nothing, ``hosted`` needs uvicorn.
"""
