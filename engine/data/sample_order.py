"""The order of samples: epoch after epoch, each in its own order or in the dataset's; the same on every grid."""

import numpy as np

from engine.data.settings import LoaderSettings
from engine.data.windows import Indices, Sampler


class SampleOrder:
    """The endless sequence of the indices of a dataset. Imports no torch."""

    def __init__(self, samples: int, settings: LoaderSettings) -> None:
        self.samples = samples
        self._shuffled = Sampler(samples, 1, settings.seed) if settings.shuffle else None

    def at(self, position: int) -> int:
        """The index at a position."""
        if self._shuffled is None:
            return position % self.samples
        return int(self._shuffled.stream(position, 1)[0])

    def of_epoch(self, epoch: int) -> Indices:
        """The indices of an epoch, in its order."""
        if self._shuffled is None:
            return np.arange(self.samples, dtype=np.int64)
        return self._shuffled.stream(epoch * self.samples, self.samples)
