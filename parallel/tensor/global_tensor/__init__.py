"""The global view: a tensor that holds a tensor rank's part and answers with the full shape.

Model code reads full sizes (``x.view(B, T, n_head, C // n_head)``, ``qkv.split(C, dim=2)``), the operations run on the
part. So code that knows nothing of ranks runs on cut parameters, and the residual stream may be cut along the sequence.

                                     rank 0           rank 1
    qkv.full  (B, T, 3 C)            q0 . k0 . v0 .   . q1 . k1 . v1     what the code sees, and who holds it
    qkv.local (B, T, 3 C / 2)        q0 k0 v0         q1 k1 v1

Two kinds of tensors meet:

    plain   equal on all ranks, and so is its gradient
    View    ``local`` carries the true gradient of the elements that only this rank holds, and a part of the gradient,
            to be summed over the holders, of those that several hold

``index`` and ``layout`` are the arithmetic, without torch; ``view`` is the class, ``context`` what all views of a model
share, ``operands`` and ``moves`` lead from plain to View and back, ``rules`` names the rule for every torch function;
the others hold the rules. A function without a rule gathers its arguments and is noted.
"""
