"""What surrounds `Tuner`: callbacks, checkpoints, streams of batches, and what it requires of its optimisers."""
