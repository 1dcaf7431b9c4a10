"""What is there for MindSpore, which is found in the process and never imported: calls run twice, and kernels that overflow."""
