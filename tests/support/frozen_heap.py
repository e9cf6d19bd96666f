"""Takes what the preloaded process imported out of the sight of the garbage collector.

A collection would look at a million objects in each forked process, and copy their pages: 0.3 CPU s a command."""

import gc

gc.collect()
gc.freeze()
