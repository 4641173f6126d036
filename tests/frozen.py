"""Imported last by the fork server: what every process that it forks would do once again is done here.

No process looks through what was imported for garbage, or through all modules for the file of a frame, as torch's
launcher does at each step of a rendezvous.
"""

import gc
import inspect
import sys

inspect.getmodule(sys._getframe())  # it remembers the files of all modules
gc.collect()
gc.freeze()
