"""PyTorch: taps that watch a program, and measuring of its tensors."""
