"""Facades for scripts written for older tools: they rename, translate configuration and choose a format. No logic."""
