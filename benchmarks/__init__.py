"""What `unskew bench NAME` runs: each module here that has `main(json_path)` is a benchmark of its name."""
