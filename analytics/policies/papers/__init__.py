"""The published answers to failures and slow devices, a module for each paper, which says what it simplifies."""
