"""Comparisons into findings: where a difference begins, who brought it in, how it went from rank to rank. Only reads."""
