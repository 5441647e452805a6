"""Basics that every other package uses: errors, settings, randomness, files. Internal: nothing here is public."""
