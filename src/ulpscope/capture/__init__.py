"""Recording a running program: sessions, what is wanted, what is stored."""
