"""ResiHP's three levels: TP, PP, DP."""
