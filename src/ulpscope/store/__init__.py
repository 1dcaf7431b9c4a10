"""Dumps on disk: append-only writing, reading that never executes anything. Knows no framework."""
