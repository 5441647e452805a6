"""What every other package builds on: errors, settings, randomness, files. Internal: nothing here is public."""
