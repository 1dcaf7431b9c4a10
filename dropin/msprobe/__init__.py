"""msprobe, answered by ulpscope."""
