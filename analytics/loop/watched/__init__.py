"""The rules of a training that is not ours, which is watched."""
