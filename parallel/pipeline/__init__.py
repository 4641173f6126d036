"""A model cut into stages, and the order in which ranks work on them.

``schedule`` says what each rank does, as pure data; ``check`` proves that it can be done and predicts how
long it takes; ``draw`` shows it. These three know no tensors and no processes and import no torch.
"""
