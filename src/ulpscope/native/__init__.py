"""All C, and its faces in Python."""
