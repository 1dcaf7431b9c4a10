"""Records into text and JSON for people and programs. Only reads."""
