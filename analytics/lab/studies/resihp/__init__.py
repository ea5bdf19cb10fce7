"""ResiHP's tables and figures beside ours."""
