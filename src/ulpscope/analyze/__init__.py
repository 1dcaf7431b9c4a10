"""Ledgers of one run, or of two, into verdicts. Only reads."""
