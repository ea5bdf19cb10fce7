"""Helpers of the tests: real runs, stores, browsers, data sets."""
