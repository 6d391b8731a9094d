"""Support for `Tuner`: callbacks, checkpoints, streams of batches, and checks of its optimisers."""
