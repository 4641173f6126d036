"""Matmuls that communicate inside the kernel, compared with chunked and plain collectives and torch's async-TP."""
