"""Dumps of other tools: files in their formats, read and written without them."""
