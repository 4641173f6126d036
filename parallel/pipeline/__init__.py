"""A model cut into stages, and the order in which ranks work on them.

``schedule`` says what each rank does, as pure data; ``order`` finds in which sequence that can happen;
``check`` proves that it can and predicts how long it takes; ``draw`` shows it. These know no tensors and no
processes and import no torch.
"""
