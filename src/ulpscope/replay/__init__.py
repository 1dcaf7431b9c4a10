"""Running recorded or running calls again: the live ledger, and single calls from a dump."""
