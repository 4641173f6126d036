"""HTTP side of the training service: Tinker's call set in, commands out, results back.

messages       protobuf messages of messages.proto, made at run time
arrays         tensors on the wire
fields         fields of a JSON body, checked one by one
directory      sessions, runs, samplers and saved weights by their ids
requests       requests as commands
replies        results as replies
routes         routes that answer with a future, and polls
listings       routes that only read
tensor_routes  second door: tensors in and out
statistics     figures of a running service
application    token, limits, clock; the ASGI application

Nothing in a request names a file, and nothing in it is evaluated or unpickled.
"""
