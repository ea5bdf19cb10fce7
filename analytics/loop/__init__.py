"""The loop without its muscles: iterations in; predictions, verdicts, proposals and scores out."""
